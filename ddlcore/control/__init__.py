"""The control network: it moves small messages between the ranks and the coordinator, and does not interpret them."""

__all__: list[str] = []

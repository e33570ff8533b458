"""The control network, which moves small messages between the ranks and the coordinator without interpreting them."""

__all__: list[str] = []

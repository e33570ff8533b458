"""The control network: moves small messages between ranks and coordinator, and knows nothing of what these decide."""

__all__: list[str] = []

"""The control network: carries a few bytes between ranks and coordinator, and knows nothing of what they decide."""

__all__: list[str] = []

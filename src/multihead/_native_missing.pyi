reason: str

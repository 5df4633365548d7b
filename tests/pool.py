from tests.worlds import pooled

__all__ = ["pooled"]

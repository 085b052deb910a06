"""How large a contrastive batch pays: hundreds of trainings on real pairs, and the law that they follow. See `__main__.py`."""

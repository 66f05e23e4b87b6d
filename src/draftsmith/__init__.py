"""draftsmith: raise EAGLE-3 drafters and prove that they serve as they were trained."""

__version__ = "0.1.0"

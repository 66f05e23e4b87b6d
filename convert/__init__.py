"""From a training checkpoint to a folder that engines load: convert, verify, export."""

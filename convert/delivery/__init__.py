"""Where a drafter is delivered: one file a kind of storage, all behind `Destination`.

version.py       what is delivered: files, hashes, manifest
destination.py   what every kind of storage can do, and which kind an address means
local.py         a folder, local or mounted
objects.py       s3:// and the other kinds that fsspec reaches
hub.py           hf://, a repository of the Hugging Face Hub
faults.py        what storage refuses, in words, without credentials
"""

"""What a run is: the strict schema, the reading of a target's files, the drafter's dimensions. Imports no other room."""

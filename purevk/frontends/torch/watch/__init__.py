"""What purevk watches of a module: what it changes while it is exported, and what is changed in it
afterwards."""

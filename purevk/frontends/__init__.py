"""From files and exported programs to graphs."""

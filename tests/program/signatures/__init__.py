"""How programs are called: arguments, guards, and modules that change."""

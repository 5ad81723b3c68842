"""`python -m multihead`."""

from multihead.cli import main

main()

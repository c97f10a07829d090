"""The command `dapo hello`."""

import typer


def hello(name: str = typer.Argument("world", help="Who is greeted.")) -> None:
    """Greet somebody."""
    typer.echo(f"hello {name}")

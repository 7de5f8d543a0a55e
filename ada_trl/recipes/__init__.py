"""The recipes. In a wheel they are in the folder of this file; in the repository they are the folder `recipes/`."""

from pathlib import Path


_IN_THE_REPOSITORY = Path(__file__).parents[2] / "recipes"
if not (Path(__file__).parent / "arithmetic").exists():
    __path__.append(str(_IN_THE_REPOSITORY))

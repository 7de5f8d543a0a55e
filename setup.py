"""
Packages and long description, which setup.cfg cannot express:
recipes are part of the package, and relative links get an address.
"""

import re
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup


ROOT = Path(__file__).parent
RECIPES = ("accelerate_configs", "arithmetic", "math", "reasoning", "sorting")


def long_description() -> str:
    """README.md with the repository's address before its relative links, which lead nowhere from elsewhere."""
    config = ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    urls = dict(line.split(" = ") for line in config["metadata"]["project_urls"].strip().splitlines())

    def absolute(link: re.Match) -> str:
        start, path = link.groups()
        if re.match(r"\w+:|#", path):
            return link[0]
        kind = "raw" if path.endswith((".png", ".svg")) else "blob"
        return f"{start}{urls['Source']}/{kind}/main/{path}"

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.sub(r"""(\]\(|\b(?:src|href|srcset)=["'])([^)"'\s]+)""", absolute, text)


setup(
    long_description=long_description(),
    long_description_content_type="text/markdown",
    packages=[*find_packages(include=["ada_trl*"]), *(f"ada_trl.recipes.{name}" for name in RECIPES)],
    package_dir={f"ada_trl.recipes.{name}": f"recipes/{name}" for name in RECIPES},
    package_data={f"ada_trl.recipes.{name}": ["*.yaml", "*.md"] for name in RECIPES},
)

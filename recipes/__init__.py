"""Complete tasks: installed as `ada_trl.recipes`, without this file and `tests/`."""

"""Where shapes are checked (conftest.py), a test of the library's own errors does without."""

import jaxtyping


class only_our_own_checks:
    """Switches off the shape checks of the test run (tests/conftest.py), which users do not have."""

    def __enter__(self):
        self.before = jaxtyping.config.jaxtyping_disable
        jaxtyping.config.update("jaxtyping_disable", True)

    def __exit__(self, *_):
        jaxtyping.config.update("jaxtyping_disable", self.before)

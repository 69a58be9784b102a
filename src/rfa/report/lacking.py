"""Results that lack what a table or a figure shows."""


class Lacking(ValueError):
    """Raised with the reason, which a report gives in the place of the table or figure; any other error is a fault."""

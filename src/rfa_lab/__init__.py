"""The lab: data, training, evaluation, records and their reports, and the command `rfa`. `rfa` never imports it."""

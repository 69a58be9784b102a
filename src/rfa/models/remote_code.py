"""What lets a saved model load without `import rfa`: `auto_map` in config.json, and the two files that it names.

transformers imports these files where `trust_remote_code=True` is given. They hold no model: they import the installed
`rfa`, or say how to install it.
"""

from pathlib import Path

from rfa.checks import PACKAGE, install_command
from rfa.files import write_text_whole

# the classes of this package that serve transformers' Auto classes, by model type
AUTO_CLASSES = {
    "rfa": {
        "AutoConfig": "RFAConfig",
        "AutoModel": "RFAModel",
        "AutoModelForCausalLM": "RFAForCausalLM",
        "AutoModelForMaskedLM": "RFAForMaskedLM",
        "AutoModelForSequenceClassification": "RFAForSequenceClassification",
        "AutoModelForTokenClassification": "RFAForTokenClassification",
    },
    "rfa_time_series": {"AutoConfig": "RFATimeSeriesConfig", "AutoModel": "RFAForTimeSeries"},
}
# transformers takes imports outside `try` for packages of that name, and would advise `pip install rfa`
_CODE = '''"""The model itself is in the installed package `rfa`; transformers looks for its classes here."""

try:
    from rfa.models import {names}  # noqa: F401
except ImportError as error:
    raise ImportError(
        "this model needs the package {package}: {install}"
        f" ({{error}})"
    ) from error
'''


def auto_map(model_type: str) -> dict[str, str]:
    """The entry of config.json: for each Auto class of transformers the file and the class that serve it."""
    return {auto: f"{_module(auto)}.{name}" for auto, name in AUTO_CLASSES[model_type].items()}


def write_remote_code(folder: Path, model_type: str) -> None:
    """Write the files that `auto_map` names."""
    need = {"package": PACKAGE, "install": install_command("hf")}
    for module in ("configuration_rfa", "modeling_rfa"):
        names = [name for auto, name in AUTO_CLASSES[model_type].items() if _module(auto) == module]
        write_text_whole(folder / f"{module}.py", _CODE.format(names=", ".join(names), **need))


def _module(auto: str) -> str:
    return "configuration_rfa" if auto == "AutoConfig" else "modeling_rfa"

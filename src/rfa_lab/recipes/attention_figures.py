"""Attention maps of every layer of a run, on demand: a recipe keeps those of the last layer only."""

from pathlib import Path

from rfa.progress import Progress
from rfa_lab.evaluation import MAP_LENGTHS, attention_maps
from rfa_lab.evaluation.attention_maps import middle_window
from rfa_lab.evaluation.evaluate import load_evaluation_input, write_maps
from rfa_lab.report.figures import attention_figure
from rfa_lab.style import save


def draw_attention(run: str | Path, out: Path, data: str | None = None, progress: Progress | None = None) -> Path:
    """Write `layer-K.npz` for each layer and `attention.png`: a row a layer, a column a head.

    A layer with decay has a second row: its weights before decay.

    The window is that of a recipe's maps: 8 training lengths in the middle of the text.

    Args:
        run: a run folder.
        out: a folder, which is made if it does not exist.
        data: as for `evaluate`: a corpus, file or folder; by default the run's own test split.
        progress: called with the number of layers done so far, and their total number.

    Returns:
        The path of the figure.

    Raises:
        ValueError: for a folder that is no run, bad data, or a text that is shorter than the window.
        OSError: if a file cannot be written.
    """
    inputs = load_evaluation_input(run, data)
    length = inputs.spec.length
    window = inputs.stream[middle_window(len(inputs.stream), MAP_LENGTHS * length)]
    model = inputs.model()
    layers = len(model.model.layers)
    rows = {}
    for layer in range(layers):
        maps, _ = attention_maps(model, window, length, layer=layer)
        write_maps(out / f"layer-{layer}.npz", maps)
        for name, when in (("weights", ""), ("undecayed", "\nbefore decay")):
            if name in maps:
                rows[f"layer {layer}{when}"] = maps[name]
        if progress is not None:
            progress(layer + 1, layers)
    save(attention_figure(rows, MAP_LENGTHS * length, length), out / "attention.png")
    return out / "attention.png"

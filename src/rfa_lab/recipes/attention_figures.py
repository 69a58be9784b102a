"""Attention maps of every layer of a run, on demand: a recipe keeps those of the last layer only."""

from functools import partial
from pathlib import Path

from rfa.files import write_whole
from rfa.forecasting.style import save
from rfa.progress import Progress
from rfa_lab.evaluation import MAP_LENGTHS, attention_maps
from rfa_lab.evaluation.attention_maps import middle_window
from rfa_lab.evaluation.evaluate import load_evaluation_input
from rfa_lab.report.figures import heads
from rfa_lab.results import write_maps


def draw_attention(run: str | Path, out: Path, data: str | None = None, progress: Progress | None = None) -> list[Path]:
    """Write `layer-K.npz` for each layer, `attention.png` and `attention-near.png`: a row a layer, a column a head.

    A layer with decay has a second row: its weights before decay.

    The window is that of a recipe's maps: 8 training lengths in the middle of the text.

    Args:
        run: a run folder.
        out: a folder, which is made if it does not exist.
        data: as for `evaluate`: a corpus, file or folder; by default the run's own test split.
        progress: called with the number of layers done so far, and their total number.

    Returns:
        The paths of the two figures.

    Raises:
        ValueError: for a folder that is no run, bad data, or a text that is shorter than the window.
        OSError: if a file cannot be written.
    """
    inputs = load_evaluation_input(run, data)
    length = inputs.spec.length
    window = inputs.stream[middle_window(len(inputs.stream), MAP_LENGTHS * length)]
    model = inputs.model()
    layers = len(model.model.layers)
    far, near = {}, {}
    for layer in range(layers):
        maps, _ = attention_maps(model, window, length, layer=layer)
        write_whole(out / f"layer-{layer}.npz", partial(write_maps, maps))
        for name, when in (("weights", ""), ("undecayed", f"\n{heads.BEFORE_DECAY}")):
            if name in maps:
                close = maps["near" if name == "weights" else "undecayed_near"]
                far[f"layer {layer}{when}"], near[f"layer {layer}{when}"] = maps[name], close
        if progress is not None:
            progress(layer + 1, layers)
    paths = [out / "attention.png", out / "attention-near.png"]
    save(heads.attention_maps(far, length), paths[0])
    save(heads.near_attention(near, length), paths[1])
    return paths

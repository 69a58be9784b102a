"""Faults of the package, and of what serves other tools."""

from .mutation import Mutation

PACKAGE = [
    Mutation("auto_classes.py", "        sys.meta_path.insert(0, _Waiting())", "        pass",
             "transformers, imported later, does not know the model", "test_import.py"),
    Mutation("auto_classes.py", "        _add(sys.modules[MAPPING])", "        pass",
             "transformers, imported before, does not know the model", "test_import.py"),
    Mutation("ops/cpu/prebuilt.py", "can.issuperset(TARGETS[target]) and path", "path",
             "kernels for registers that the processor lacks", "ops/cpu/test_prebuilt.py"),
    Mutation("ops/cpu/compiler.py", "if target is None or part", "if target or part",
             "the kernels of a wheel name an OpenMP of their own", "ops/cpu/test_prebuilt.py"),
    Mutation("cli/console.py", "            said = time.monotonic()", "            pass",
             "a line of progress for every step", "test_console.py"),
]  # fmt: skip

INTEGRATIONS = [
    Mutation("integrations/masks.py", "else visible == 0", "else visible <= 0",
             "all keys of an additive mask are seen", "integrations/test_masks.py"),
    Mutation("integrations/masks.py", "key_mask = visible.any(1)", "key_mask = visible[:, -1]",
             "only the last query says which keys take part", "integrations/test_masks.py"),
    Mutation("integrations/masks.py", "bool(((seen & same) == visible).all())", "bool((seen & same).any())",
             "a window counts as packed sequences", "integrations/test_masks.py"),
    Mutation("integrations/replaced_attention.py", "new=not cached)", "new=False)",
             "tables of older parameters", "integrations/test_replace_attention.py"),
    Mutation("integrations/replaced_attention.py", 'torch.arange(cached, cached + length', 'torch.arange(0, length',
             "tokens after a cache begin at time 0 again", "integrations/test_replace_attention.py"),
    Mutation("integrations/replaced_attention.py", 'dynamics["frequency"][:: self.share]',
             'dynamics["frequency"][: len(dynamics["frequency"]) // self.share]',
             "heads of keys take the frequencies of other heads", "integrations/test_replace_attention.py"),
    Mutation("integrations/replaced_attention.py", "and not cached and", "and past_key_values is None and",
             "packed sequences run together beside an empty cache", "integrations/test_replace_attention.py"),
    Mutation("integrations/replaced_attention.py", "modes * variance / (2 * exponent)", "modes * variance / exponent",
             "scores begin twice as steep", "integrations/test_replace_attention.py"),
    Mutation("integrations/replace_attention.py", "return -rotary[0]", "return rotary[0]",
             "states turn the other way", "integrations/test_replace_attention.py"),
    Mutation("integrations/replace_attention.py", "factor == 1 and", "factor > 0 and",
             "RoPE with a factor is taken without it", "integrations/test_replace_attention.py"),
    Mutation("integrations/attention_interface.py", "* freedom / (2 * (", "* freedom / ((",
             "scores twice as steep", "integrations/test_attention_interface.py"),
    Mutation("integrations/attention_interface.py", "flags = read_mask(attention_mask, batch, queries, keys)",
             "flags = read_mask(None, batch, queries, keys)",
             "padding takes part", "integrations/test_attention_interface.py"),
    Mutation("integrations/flex.py", "(decayed.lse - plain.lse)", "(plain.lse - plain.lse)",
             "estimates are not decayed", "integrations/test_flex.py"),
    Mutation("integrations/flex.py", "torch.log2(1 + w * r * UNIT)", "torch.log2(1 + w * r)",
             "the unit of the tables", "integrations/test_flex.py"),
    Mutation("integrations/flex.py", "lag = (i + first - j).abs()", "lag = (i - j).abs()",
             "fewer queries than keys stand at the first times", "integrations/test_flex.py"),
    Mutation("integrations/flex.py", "masked_fill(unseen[..., None], 0.0)", "masked_fill(unseen[..., None], 1.0)",
             "a query without keys has an estimate", "integrations/test_flex.py"),
]  # fmt: skip

PARALLEL = [
    Mutation("parallel/ring.py", "totals[: shards.rank].sum(0)", "totals[: shards.rank + 1].sum(0)",
             "C of a shard begins too late", "parallel/test_context.py"),
    Mutation("parallel/ring.py", "grad[..., -1] += later", "pass",
             "gains of a shard have no gradient from the later ones", "parallel/test_context.py"),
    Mutation("parallel/ring.py", "weight[..., 0] * (difference + grad_log_sum)", "weight[..., 0] * grad_log_sum",
             "the shares of blocks have no gradient", "parallel/test_context.py"),
    Mutation("parallel/ring.py", "rank <= self.rank or not", "rank < self.rank or not",
             "a process does not see its own keys", "parallel/test_context.py"),
    Mutation("parallel/heads.py", "grad_placements=[Partial()]", "grad_placements=[Replicate()]",
             "gradients of the heads of others are lost", "parallel/test_heads.py"),
]  # fmt: skip

EXPORT = [
    Mutation("export/folder.py", 'padding_side="left"', 'padding_side="right"',
             "prompts of a batch are continued after their padding", "export/test_export.py"),
    Mutation("export/folder.py", '_SAME = ("preset", "seed", ', '_SAME = ("preset", ',
             "the card shows the result of another seed", "export/test_export.py"),
    Mutation("models/remote_code.py", '"AutoModelForCausalLM": "RFAForCausalLM"', '"AutoModelForCausalLM": "RFAModel"',
             "a model without its head is loaded", "export/test_export.py"),
    Mutation("nn/projections.py", "    made.__class__ = nn.Linear\n", "",
             "torch.ao leaves the projections alone", "models/test_tools.py"),
    Mutation("ops/positions.py", "tuple[Tensor, ...]] = {}  #", "tuple[Tensor, ...]] = dict[str, int]()  #",
             "a model cannot be exported strictly", "models/test_compiled.py"),
]  # fmt: skip

MODELS = [
    Mutation("models/packing.py", "(begun & ~self.key_mask).cumsum(-1)", "(begun & ~self.key_mask).long()",
             "only the last gap takes no time", "models/test_masks.py"),
    Mutation("models/modeling.py", "            times = tokens.places()", "            pass",
             "padding between tokens takes time", "models/test_masks.py"),
    Mutation("models/modeling.py", "mask | (attention_mask == 0)", "mask | (attention_mask != 1)",
             "masks to be added to scores are read the wrong way round", "models/test_masks.py"),
    Mutation("models/decoder.py", "new = set() if own and not untied else", "new =",
             "a head that is missing is drawn at random", "models/test_bad_checkpoints.py"),
    Mutation("nn/cache.py", "copy.deepcopy(self.__dict__, memo)", "copy.deepcopy(self.__getstate__(), memo)",
             "a copy of a cache serves any model", "models/test_generation.py"),
]  # fmt: skip

"""A smaller model for speculative decoding: blocks of the base, taught its predictions."""

from pathlib import Path

from inferlab.distillation import draft as study
from inferlab.distillation.depth import Trunk
from inferlab.distillation.draft_checkpoint import save_draft, shares
from inferlab.distillation.draft_cost import decode_costs
from inferlab.distillation.draft_plots import plot_draft
from inferlab.distillation.shallow import distil
from inferlab.models.loading import load_model
from inferlab.models.runtime.config import read_config
from inferlab.run import stage
from inferlab.store import load_tensors, open_checkpoint

BASE, WINDOWS = Path("models/base"), Path("data/windows")


def main() -> None:
    """Write models/draft, what it is worth as a draft, and how it came to that."""
    with stage("draft", study.DraftParams) as run:
        params, name, base = run.params, run.params.criterion, open_checkpoint(BASE)
        study.check(params, read_config(base))
        splits = ("calibration", "heldout", "training")
        files = {split: load_tensors(WINDOWS / f"{split}.safetensors") for split in splits}
        texts = study.cut({split: file["input_ids"] for split, file in files.items()}, params)
        trunk = Trunk(load_model(BASE, run.threads))
        with run.timed("choose"):
            exam = study.make_exam(trunk, texts, params)
            chosen = study.select(trunk, texts, exam, params)
        with run.timed("distil"):
            start = trunk.stack.only(chosen.kept[name])
            stack, checks = distil(
                trunk, start, texts.training, exam, params.distillation, run.seed
            )
        after, folder = checks[-1].found, run.folder("models/draft")
        save_draft(folder, base, chosen.kept[name], stack)
        run.timing(**decode_costs(BASE, folder, texts.heldout[0], params.decode))
        found = study.summary(chosen, after, name) | shares(open_checkpoint(folder), base)
        steps = study.step_table(chosen.before[name], checks)
        run.metrics("metrics/draft.json", found)
        run.table("plots/draft/arms.csv", study.arm_table(chosen, after, name))
        run.table("plots/draft/steps.csv", steps)
        run.table("plots/draft/layers.csv", chosen.layers)
        plot_draft(steps, chosen.layers, run.output("plots/draft/draft.png"))


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""One value of a real ZeRO checkpoint is changed at a time. Damage is refused with one line that names the file and says what is
wrong, and nothing is written. What other versions of DeepSpeed do differently is read like the original.

usage: deepspeed_refused.py FSDPCKPT CORPUS       exit 77 without torch or safetensors
"""
import json
import os
import shutil
import sys
import tempfile

try:
    import torch
    from checks import check, finish, refused, run
    from deepspeed_read import stand_in_for_deepspeed
    from edits import GONE, SPARSE, Add, Apply, changed
except ImportError as e:
    print("skipped: %s" % e)
    sys.exit(77)

M2, O2 = "mp_rank_00_model_states.pt", "bf16_zero_pp_rank_%d_mp_rank_00_optim_states.pt"
M3, O3 = "zero_pp_rank_%d_mp_rank_00_model_states.pt", "zero_pp_rank_%d_mp_rank_00_optim_states.pt"
Z2, Z3, U1, U3 = "zero2-bf16", "zero3-subgroups", "zero1-bf16-universal", "zero3-bf16-universal"
STATE, OPT = "zero/optimizer_state.pt", "optimizer_state_dict"
STATE_OF_1 = tuple("optim.state.%s.%s" % (p, k) for p in ("scale", "l1.bias", "norm.weight", "norm.bias", "l2.bias")
                   for k in ("exp_avg", "exp_avg_sq", "step"))
ADAM2 = (OPT, "base_optimizer_state", "state", 0)
NAME = "the name of a parameter is not a string"


# case, file, keys that lead to the changed value, its new value, exit status, words of the message
REFUSED = (
    # The model's file.
    (Z2, M2, (), [1], 3, "'module' is missing"),
    (Z2, M2, ("module",), 5, 3, "'module' is missing"),
    (Z2, M2, ("module",), Add({5: torch.ones(1)}), 3, NAME),
    (Z2, M2, ("module",), Add({"a\0b": torch.ones(1)}), 3, NAME),
    (Z2, M2, ("module",), Add({"bent": SPARSE}), 5, "sparse"),
    (Z2, M2, ("module", "steps"), SPARSE, 5, "sparse"),
    (Z2, M2, ("param_shapes",), 5, 3, "param_shapes is missing"),
    (Z2, M2, ("param_shapes", 1), 5, 3, "a group of param_shapes is not a dict"),
    (Z2, M2, ("param_shapes", 0), Add({5: torch.Size([1])}), 3, NAME),
    (Z2, M2, ("param_shapes", 0, "cube"), "x", 3, "cube: its shape is invalid"),
    (Z2, M2, ("param_shapes", 0, "cube"), [3, -1], 3, "cube: its shape is invalid"),
    (Z2, M2, ("param_shapes", 0, "cube"), [3, 2.5], 3, "cube: its shape is invalid"),
    (Z2, M2, ("param_shapes", 0, "cube"), [1] * 33, 3, "cube: its shape is invalid"),
    (Z2, M2, ("param_shapes", 0, "cube"), [2**62, 4], 3, "cube: its shape is invalid"),
    (Z2, M2, ("param_shapes", 0, "cube"), [2**60, 4], 3, "cube: its shape is invalid"),
    (Z2, M2, ("param_shapes", 0, "cube"), [3, 2, 50], 3, "belong to another rank"),
    (Z2, M2, ("buffer_names",), [5], 3, NAME),
    (Z2, M2, ("frozen_param_shapes",), {5: torch.Size([1])}, 3, NAME),
    (Z2, M2, ("frozen_param_fragments",), GONE, 3, "frozen.weight has no data"),
    (Z2, M2, ("frozen_param_fragments", "frozen.bias"), SPARSE, 5, "sparse"),
    (Z2, M2, ("shared_params",), {5: "embed.weight"}, 3, NAME),
    (Z2, M2, ("shared_params",), {"head.weight": 5}, 3, NAME),
    (Z2, M2, ("shared_params",), {"head.weight": "nobody"}, 3, "head.weight is another name of nobody, but that tensor is missing"),
    (Z2, M2, (), Add({None: 1}), 5, "a key that is neither a string"),
    (Z2, M2, ("note",), SPARSE, 5, "deepspeed.note"),
    (Z2, M2, ("note",), {"a.b": 1, "a": {"b": 2}}, 3, "the name deepspeed.note.a.b appears twice"),
    (Z2, M2, ("optimizer",), {"a": SPARSE}, 5, "optim.a"),
    # The optimizer's files up to ZeRO-2.
    (Z2, O2 % 0, (), [1], 3, "optimizer_state_dict is missing"),
    (Z2, O2 % 2, (OPT,), 5, 3, "optimizer_state_dict is missing"),
    (Z2, O2 % 0, (OPT, "zero_stage"), 4, 3, "zero_stage is not 1, 2 or 3"),
    (Z2, O2 % 0, (OPT, "zero_stage"), 0, 3, "zero_stage is not 1, 2 or 3"),
    (Z2, O2 % 0, (OPT, "zero_stage"), "two", 3, "zero_stage is not 1, 2 or 3"),
    (Z2, O2 % 1, (OPT, "zero_stage"), GONE, 3, "its ZeRO stage is 1, but that of rank 0 is 2"),
    (Z2, O2 % 0, (OPT, "partition_count"), GONE, 3, "partition_count is missing"),
    (Z2, O2 % 0, (OPT, "partition_count"), [], 3, "partition_count is missing"),
    (Z2, O2 % 0, (OPT, "partition_count"), [3, "x"], 3, "partition_count is missing"),
    (Z2, O2 % 1, (OPT, "partition_count"), [3, 2], 5, "different numbers of ranks"),
    (Z2, O2 % 1, (OPT, "partition_count"), [2, 3], 5, "different numbers of ranks"),
    (Z2, O2 % 1, (OPT, "partition_count"), 4, 3, "4 ranks wrote the checkpoint, but there are 3 files"),
    (Z2, O2 % 0, ADAM2, Add({5: 1}), 3, "a name in the optimizer's state is not a string"),
    (Z2, O2 % 0, ADAM2, Add({"": 1}), 3, "a name in the optimizer's state is not a string"),
    (Z2, O2 % 0, ADAM2, Add({"a\0b": 1}), 3, "a name in the optimizer's state is not a string"),
    (Z2, O2 % 0, ADAM2, Add({"bent": SPARSE}), 5, "sparse"),
    (Z2, O2 % 1, (*ADAM2, "exp_avg"), GONE, 3, "exp_avg is not a tensor"),
    (Z2, O2 % 1, (*ADAM2, "exp_avg"), SPARSE, 5, "sparse"),
    (Z2, O2 % 1, (*ADAM2, "exp_avg"), torch.ones(120)[::2], 3, "exp_avg is not a contiguous tensor of one dimension"),
    (Z2, O2 % 1, (*ADAM2, "exp_avg"), torch.ones(60).double(), 3, "it is float64 here, but float32 in the files of other ranks"),
    (Z2, O2 % 0, (*ADAM2, "exp_avg"), torch.ones(61), 3, "exp_avg has 61 elements, but the fp32 masters have 60"),
    (Z2, O2 % 1, (*ADAM2, "exp_avg"), torch.ones(59), 3, "exp_avg has 59 elements, but the fp32 masters have 60"),
    (Z2, O2 % 0, (OPT, "single_partition_of_fp32_groups"), GONE, 3, "the number of its partitions differs"),
    (Z2, O2 % 0, (OPT, "single_partition_of_fp32_groups"), [torch.ones(60)], 3, "the number of its partitions differs"),
    (Z2, O2 % 0, (OPT, "single_partition_of_fp32_groups", 0), torch.ones(6, 10), 3, "not a contiguous tensor of one dimension"),
    (Z2, O2 % 0, (OPT, "param_alignment_paddings"), [[0] * 4], 3, "param_alignment_paddings lacks a group"),
    (Z2, O2 % 0, (OPT, "param_alignment_paddings"), [[0], [0]], 3, "param_alignment_paddings lacks a parameter"),
    (Z2, O2 % 0, (OPT, "param_alignment_paddings", 0, 1), -1, 3, "param_alignment_paddings lacks a parameter"),
    (Z2, O2 % 0, (OPT, "param_alignment_paddings", 0, 1), "x", 3, "param_alignment_paddings lacks a parameter"),
    (Z2, O2 % 0, (OPT, "param_alignment_paddings", 0, 0), 2**63 - 1, 3, "the sizes of its parameters overflow"),
    (Z2, O2 % 0, (OPT, "clip_grad"), SPARSE, 5, "sparse"),
    (Z2, O2 % 0, (OPT, "base_optimizer_state", "param_groups", 0, "lr"), SPARSE, 5, "sparse"),
    # ZeRO-3.
    (Z3, O3 % 1, (OPT, "fp32_flat_groups"), GONE, 3, "fp32_flat_groups is missing"),
    (Z3, O3 % 1, (OPT, "fp32_flat_groups"), Apply(lambda groups: groups[:1]), 3, "its partitions have 47 elements, but its shards have 56"),
    (Z3, O3 % 1, (OPT, OPT, "state", 1, "exp_avg"), torch.ones(8), 3, "exp_avg has 8 elements, but the fp32 masters have 9"),
    (Z3, M3 % 0, ("frozen_param_fragments",), GONE, 3, "frozen parameter frozen.weight"),
    (Z3, M3 % 0, ("frozen_param_shapes", "frozen.weight"), "x", 3, "frozen.weight: its shape is invalid"),
    (Z3, M3 % 1, ("frozen_param_fragments",), GONE, 3, "frozen.weight is not a tensor"),
    (Z3, M3 % 1, ("frozen_param_fragments", "frozen.weight"), torch.ones(7), 3, "its shard is too small or has another dtype"),
    (Z3, M3 % 1, ("frozen_param_fragments", "frozen.bias"), torch.ones(2).half(), 3, "its shard is too small or has another dtype"),
    (Z3, M3 % 1, (), [1], 3, "frozen.weight is not a tensor"),
    # What ds_to_universal.py writes.
    (U1, STATE, (), [1], 3, "the file does not hold a dict"),
    (U1, STATE, ("zero_stage",), 7, 3, "zero_stage is not 1, 2 or 3"),
    (U3, STATE, ("partition_count",), GONE, 3, "partition_count is missing"),
    (U3, STATE, ("partition_count",), 0, 3, "partition_count is missing"),
    (U3, STATE, ("partition_count",), 2**40, 3, "partition_count is missing"),
    (U3, STATE, (OPT, "state", 0), Add({None: 1}), 5, "a key that is neither a string"),
    (U3, STATE, (OPT, "state", 0, "step"), SPARSE, 5, "sparse"),
    (U3, STATE, ("overflow",), SPARSE, 5, "sparse"),
    (U1, "zero/l1.weight/fp32.pt", (), 5, 3, "the file does not hold a tensor"),
    (U1, "zero/l1.weight/fp32.pt", ("param",), torch.ones(42), 3, "its shape differs from that of parameter l1.weight"),
    (U1, "zero/l1.weight/exp_avg.pt", ("param",), torch.ones(6, 7), 3, "its shape differs from that of parameter l1.weight"),
    (U1, "zero/l1.weight/exp_avg.pt", ("param",), SPARSE, 5, "sparse"),
    (U3, "zero/l1.weight/fp32.pt", (), torch.ones(41), 3, "the tensor has 41 elements, but parameter l1.weight has 42"),
    (U3, "zero/l1.weight/fp32.pt", (), torch.ones(84)[::2], 3, "not a contiguous tensor of one dimension"),
    (U3, "zero/l1.weight/fp32.pt", (), torch.ones(6, 7), 3, "its shape differs from that of parameter l1.weight"),
)

# The same, but the checkpoint is read. The tensors that it lacks, and words of its note.
ACCEPTED = (
    (Z2, M2, ("param_shapes", 0, "cube"), [3, 2, 5], (), ""),
    (Z2, M2, ("buffer_names",), Apply(lambda names: [*names, "not saved"]), (), ""),
    (Z2, M2, ("buffer_names",), GONE, (), ""),
    (Z3, M3 % 0, ("shared_params",), GONE, ("model.head.weight",), "1 name of the module, such as head.weight, has no data"),
    (Z3, M3 % 0, (), Apply(lambda m: {**m, "shared_params": None, "module": {**m["module"], "tied": torch.ones(0)}}),
     ("model.head.weight",), "2 names of the module, such as head.weight, have no data"),
    (U1, M2, ("param_shapes",), Apply(lambda groups: {**groups[0], **groups[1]}), (), ""),  # as older versions write it
    (Z2, O2 % 1, (OPT, "partition_count"), 3, (), ""),
    (Z2, O2 % 0, (OPT, "param_alignment_paddings"), GONE, (), ""),
    (Z2, O2 % 0, (OPT, "param_slice_mappings"), GONE, (), ""),
    (Z2, O2 % 0, (OPT, "param_slice_mappings"), [5, {5: 5, "nobody": 5, "scale": 5}], (), ""),
    (Z2, O2 % 0, (OPT, "base_optimizer_state", "param_groups"), [5, 5], (), ""),
    (Z2, O2 % 0, (*ADAM2, "step"), torch.ones(1), (), ""),
    (Z2, O2 % 0, (OPT, "base_optimizer_state"), Apply(lambda base: [base["state"][0], base["state"][1]]), (), ""),
    (Z2, O2 % 0, (OPT, "base_optimizer_state"), Apply(lambda base: [base["state"][0]]), STATE_OF_1, ""),
    (Z2, O2 % 0, ADAM2, Add({"note": "kept"}), (), ""),
)


# Files of the step that are written ({name: content}, / for a directory) or removed, exit status, words of the message.
FILES = (
    ({"layer_00-model_states.pt": ""}, 5, "pipeline-parallel checkpoints"),
    ({"layer_0_expert_0_mp_rank_00_model_states.pt": ""}, 5, "expert parallelism"),
    ({"zero_pp_rank_0_mp_rank_00_optim_states.pt": ""}, 3, "files of two checkpoints are mixed here"),
    ({"fp16_mp_rank_00_model_states.pt": ""}, 3, "files of two checkpoints are mixed here"),
    ({"zero_pp_rank_1_mp_rank_00_model_states.pt": ""}, 3, "the file of rank 0 is missing"),
    ({"zero_pp_rank_0_mp_rank_00_model_states.pt": ""}, 3, "files of two checkpoints are mixed here"),
    ({"zero_pp_rank_x_mp_rank_00_optim_states.pt": "", "zero_pp_rank_9999999_mp_rank_00_optim_states.pt": "",
      "bf16_zero_pp_rank_3_optim_states.pt": "", "mp_rank_x_model_states.pt": "", "mp_rank_00_optim_states.pt": "",
      "mp_rank_00_states.pt": ""}, 0, ""),
    ({"../latest": ""}, 0, ""),
    ({"../latest": "../elsewhere"}, 0, ""),
    ({"../latest": "x" * 300}, 0, ""),
    ({"../latest": "global_step2\r\n"}, 0, ""),
    ({"../latest": GONE, "../global_step3/": "", "../global_step4": "", "../global_step5/a": ""}, 0, ""),
)


class Home:
    """A copy of each case that is used, in which one file at a time is changed."""

    def __init__(self, corpus, path):
        self.corpus, self.path = corpus, path

    def copy(self, case):
        path = os.path.join(self.path, case)
        if not os.path.exists(path):
            shutil.copytree(os.path.join(self.corpus, "0.19.8-" + case), path)
        return path, os.path.join(path, "global_step2" + ("_universal" if "universal" in case else ""))

    def change(self, case, file, keys, new):
        """Returns the checkpoint and what restores it."""
        checkpoint, step = self.copy(case)
        path, kept = os.path.join(step, file), os.path.join(self.path, "kept")
        shutil.copy(path, kept)
        torch.save(changed(torch.load(path, weights_only=False), keys, new), path)
        return checkpoint, lambda: shutil.copy(kept, path)


def inspect(program, checkpoint):
    listed = json.loads(run(program, "inspect", checkpoint, "--json").stdout)
    return {t["name"] for t in listed["tensors"]}, listed.get("note") or ""


def changes(program, home):
    for case, file, keys, new, status, words in REFUSED:
        checkpoint, restore = home.change(case, file, keys, new)
        refused(program, checkpoint, "%s: %s: %s" % (case, file, keys), words, status=status)
        restore()
    for case, file, keys, new, gone, words in ACCEPTED:
        what, original = "%s: %s: %s" % (case, file, keys), os.path.join(home.corpus, "0.19.8-" + case)
        checkpoint, restore = home.change(case, file, keys, new)
        (was, _), (now, note) = inspect(program, original), inspect(program, checkpoint)
        check(was - now == set(gone) and not now - was, "%s: %s" % (what, sorted(now ^ was)))
        check(words in note and bool(words) == bool(note), "%s: note: %s" % (what, note))
        run(program, "diff", original, checkpoint, "--data", "-q", *("--include=" + n for n in now if not n.endswith(".step")))
        restore()


def files(program, home):
    for made, status, words in FILES:
        checkpoint, step = home.copy(Z2)
        for name, content in made.items():
            path = os.path.join(step, name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            if content is GONE:
                os.remove(path)
            elif not name.endswith("/"):
                with open(path, "w", encoding="utf-8") as f:
                    f.write(content)
        if status:
            refused(program, checkpoint, ", ".join(made), words, status=status)
        else:
            check(inspect(program, checkpoint) == inspect(program, os.path.join(home.corpus, "0.19.8-" + Z2)), "%s" % made)
        shutil.rmtree(checkpoint)


def main():
    program, corpus = sys.argv[1:3]
    path = tempfile.mkdtemp(prefix="fc-ds-")
    stand_in_for_deepspeed()
    try:
        home = Home(corpus, path)
        changes(program, home)
        shutil.rmtree(home.copy(Z2)[0])
        files(program, home)
    finally:
        shutil.rmtree(path)
    return finish("deepspeed, refused")


if __name__ == "__main__":
    sys.exit(main())

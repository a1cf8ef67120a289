"""Compares bench/scale_plan with the sum of the boxes that `reshard --dry-run --rank` lists for each rank."""

import json
import os
import subprocess

import harness

MODEL = "dcp-torch2.15.0-2d-dp4tp2"


class Scale(harness.Case):
    def plan(self, source, mesh):
        dp, _, tp = mesh.partition("x")
        args = ["--dp", dp] + (["--tp", tp] if tp else [])
        ranks = int(dp) * int(tp or 1)
        return [json.loads(self.ok("reshard", source, *args, "--dry-run", "--rank", r, "--json")) for r in range(ranks)]

    def stored(self, plans):
        """{tensor: [(rank, offsets, sizes)]} of the stored boxes."""
        out = {}
        for p in plans:
            for v in p["values"]:
                if v["stored_by"] == p["rank"] and v["bytes"]:
                    out.setdefault(v["name"], []).append((p["rank"], v["offsets"], v["sizes"], v["bytes"]))
        return out

    def test_message_counts_agree(self):
        with open(self.path("model.json"), "w") as f:
            f.write(self.ok("schema", harness.corpus(MODEL)))
        for source, target in (("8", "4x2"), ("4x2", "8"), ("3", "2x2"), ("2x2", "5"), ("8", "8"), ("16", "3x4")):
            p = subprocess.run([os.environ["SCALE_PLAN"], "model.json", source, target], cwd=self.dir, text=True,
                               capture_output=True)
            self.assertEqual((p.returncode, p.stderr), (0, ""))
            got = json.loads(p.stdout)
            a, b = self.stored(self.plan("model.json", source)), self.stored(self.plan("model.json", target))
            messages = remote = local = 0
            pairs, received = set(), {}
            for name, boxes in b.items():
                for rank, offsets, sizes, nbytes in boxes:
                    volume = 1
                    for s in sizes:
                        volume *= s
                    for other, o, s, _ in a[name]:
                        overlap = [min(x + n, y + m) - max(x, y) for x, n, y, m in zip(offsets, sizes, o, s)]
                        if min(overlap, default=1) <= 0:
                            continue
                        n = nbytes // volume
                        for x in overlap:
                            n *= x
                        if other == rank:
                            local += n
                        else:
                            messages, remote = messages + 1, remote + n
                            pairs.add((rank, other))
                            received[rank] = received.get(rank, 0) + n
            self.assertEqual((got["messages"], got["remote_bytes"], got["local_bytes"], got["pairs"], got["most_received"]),
                             (messages, remote, local, len(pairs), max(received.values(), default=0)), (source, target))
            partners = [sum(r == rank for r, _ in pairs) for rank in range(got["to_ranks"])]
            self.assertEqual(got["most_partners"], max(partners))


if __name__ == "__main__":
    harness.main()

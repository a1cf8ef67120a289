"""What packages say about themselves: one version everywhere, a conda recipe that its own tool understands."""

import importlib.util
import os
import re
import subprocess
import sys
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def found(pattern, file):
    return re.search(pattern, (ROOT / file).read_text(), re.M).group(1)


class Metadata(unittest.TestCase):
    def test_one_version(self):
        version = found(r"^project\(fsdpckpt VERSION ([0-9.]+)", "CMakeLists.txt")
        said = {
            "debian/changelog": found(r"\Afsdpckpt \(([^)]+)\)", "debian/changelog"),
            "conda": found(r"^  version: ([0-9.]+)$", "packaging/conda/recipe.yaml"),
            "the command": subprocess.check_output([os.environ["FSDPCKPT"], "--version"], text=True).split()[1],
            "docs/ci": found(r"rev: v([0-9.]+)", "docs/ci/pre-commit-config.yaml"),
            "the workflow": found(r"uses: OWNER/fsdpckpt@v([0-9.]+)", "docs/ci/github-actions.yml"),
        }
        self.assertEqual(said, dict.fromkeys(said, version))

    def test_debian_names_the_soname(self):
        soname = ".".join(found(r"^project\(fsdpckpt VERSION ([0-9.]+)", "CMakeLists.txt").split(".")[:2])
        self.assertEqual(found(r"^Package: libfsdpckpt([0-9.]+)$", "debian/control"), soname)
        self.assertTrue((ROOT / f"debian/libfsdpckpt{soname}.install").exists())

    def test_everyone_needs_the_same_python_packages(self):
        given = sorted(re.findall(r'"([^"]+)"', found(r"^dependencies = \[(.*)\]", "pyproject.toml")))
        recipe = found(r"^  run:\n((?:    - .*\n)+)", "packaging/conda/recipe.yaml")
        self.assertEqual(re.findall(r"- (.*)", recipe.replace(" >=", ">=")), [*given, "python"])

    @unittest.skipUnless(importlib.util.find_spec("rattler_build"), "py-rattler-build is not installed")
    def test_the_conda_recipe_is_understood(self):
        import rattler_build
        recipe = rattler_build.Stage0Recipe.from_file(ROOT / "packaging/conda/recipe.yaml")
        variants = rattler_build.VariantConfig.from_yaml("c_compiler: [gcc]\nc_stdlib: [sysroot]\npython: ['3.12']")
        (variant,) = recipe.render(variants)
        self.assertIn("gcc_linux-64", str(variant.recipe.requirements.build))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])

"""The page of inspect --html in a headless Chromium: content, pictures, search, phone width and hostile names.

Skipped (77) without Chromium.
"""

import html.parser
import json
import os
import re
import shutil
import subprocess
import sys
import urllib.parse

import harness

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NASTY = ['</script><script>document.title="owned"</script>', '"><img src=x onerror=document.title="owned">', "it's & <b>",
         "bidi\u202etxt.gnp", "{{}}`${1}`", "a.\u0001b", "<!--"]


class Elements(html.parser.HTMLParser):
    """The elements of a page as (tag, attributes, text)."""

    def __init__(self, text):
        super().__init__()
        self.found, self.stack = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        element = [tag, dict(attrs), ""]
        self.found.append(element)
        if tag not in ("meta", "input", "link", "br", "img"):
            self.stack.append(element)

    def handle_endtag(self, tag):
        while self.stack and self.stack.pop()[0] != tag:
            pass

    def handle_data(self, data):
        for element in self.stack:
            element[2] += data

    def all(self, tag, **attributes):
        return [e for e in self.found if e[0] == tag and
                all(v in (e[1].get(k.rstrip("_")) or "").split() for k, v in attributes.items())]


class Page(harness.Case):
    def page(self, source, *args):
        self.ok("inspect", source, "--html", "page.html", "--force", *args)
        with open(self.path("page.html"), encoding="utf-8") as f:
            return f.read()

    def browse(self, fragment=None, *flags):
        """The elements of the page after its script has run."""
        address = "file://" + urllib.parse.quote(self.path("page.html"))
        if fragment:
            address += "#" + urllib.parse.urlencode(fragment)
        p = subprocess.run([BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--user-data-dir=" + self.path("chromium"),
                            "--virtual-time-budget=5000", "--enable-logging=stderr", "--dump-dom", *flags, address],
                           capture_output=True, text=True, timeout=240)
        self.assertEqual(p.returncode, 0, p.stderr)
        errors = [line for line in p.stderr.splitlines() if "CONSOLE" in line]
        self.assertEqual(errors, [])
        return Elements(p.stdout)

    def schema(self, tensors):
        with open(self.path("model.json"), "w") as f:
            json.dump({"fsdpckpt": "schema", "version": 1, "tensors": [
                {"name": n, "dtype": "bf16", "shape": shape} for n, shape in tensors]}, f)
        return "model.json"

    def test_pictures_name_the_replicas(self):
        self.page(harness.corpus("dcp-torch2.15.0-hsdp-tp"))
        name = "model.layers.0.attention.wo.weight"
        page = self.browse({"open": name, "rank": 5})
        svg = [e for e in page.all("svg") if "rank" in e[1].get("aria-label", "") and "have" in e[1]["aria-label"]]
        self.assertEqual(len(svg), 1)
        # torch numbers ranks in row-major order on replicate 2 × dp 2 × tp 2. dp cuts rows, tp cuts columns.
        self.assertEqual(svg[0][1]["aria-label"],
                         "ranks 0, 4 have [0:4, 0:4]; ranks 1, 5 have [0:4, 4:8]; "
                         "ranks 2, 6 have [4:8, 0:4]; ranks 3, 7 have [4:8, 4:8]")
        says = next(e for e in page.all("span") if e[1].get("id") == "rank-says")
        self.assertIn("replicate 1, dp 0, tp 1", says[2])
        self.assertEqual(len(page.all("table", class_="mesh")), 2)

    def test_search(self):
        self.page(self.schema([(f"layers.{i}.{n}", [8, 8]) for i in range(32) for n in ("wq", "wo")] + [("norm", [8])]))

        def shown(query):
            leaves = self.browse({"search": query}).all("details", class_="leaf")
            return [e[1]["data-name"] for e in leaves if "hidden" not in e[1]]

        self.assertEqual(shown("norm"), ["norm"])
        self.assertEqual(shown("layers.17.wq"), ["layers.{0..31}.wq"])
        self.assertEqual(shown("layers.32"), [])
        self.assertEqual(len(shown("bfloat16 8x8")), 2)

    def test_names_cannot_become_code(self):
        for names in (NASTY, ["model." + n for n in NASTY]):
            text = self.page(self.schema([(n, [4]) for n in names]))
            page = self.browse()
            self.assertEqual(page.all("title")[0][2], "model.json · fsdpckpt")
            self.assertEqual((len(page.all("script")), len(page.all("img")), len(page.all("b"))), (2, 0, 0))
            self.assertEqual(len(page.all("details", class_="leaf")), len(names))
            self.assertNotIn("\u202e", text)
            self.assertIn("bidi\\u202etxt.gnp", text)

    def test_content_policy_blocks_foreign_scripts(self):
        text = self.page(harness.corpus("dcp-torch2.15.0-fsdp2"))
        with open(self.path("page.html"), "w", encoding="utf-8") as f:
            f.write(text.replace("</main>", "</main><script>document.title='owned'</script>"))
        p = subprocess.run([BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=2000", "--dump-dom",
                            "--user-data-dir=" + self.path("chromium"), "file://" + self.path("page.html")],
                           capture_output=True, text=True, timeout=240)
        self.assertNotIn("<title>owned", p.stdout)
        self.assertIn('class="mesh"', p.stdout)  # the page's own script ran

    def test_phone_width(self):
        """The page is no wider than a phone. Only pictures scroll, each in its own box."""
        probe = "<script>document.title = document.documentElement.scrollWidth + ' of ' + innerWidth;</script></body>"
        for source in (harness.corpus("dcp-torch2.15.0-hsdp-tp"), self.schema([("x" * 200, [4] * 8), ("a.b." + "y" * 90, [4])])):
            text = self.page(source)
            with open(self.path("page.html"), "w", encoding="utf-8") as f:
                f.write(re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text).replace("</body>", probe))
            title = self.browse(None, "--window-size=390,900").all("title")[0][2]
            wide, window = map(int, title.split(" of "))
            self.assertLessEqual(wide, window)
            self.assertLessEqual(window, 500)


if __name__ == "__main__":
    if BROWSER is None:
        print("no Chromium: skipped")
        sys.exit(77)
    harness.main()

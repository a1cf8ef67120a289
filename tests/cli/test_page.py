"""The page of inspect --html in a headless Chromium: content, pictures, search, statistics, keyboard, contrast, phone width
and hostile names.

Skipped (77) without Chromium.
"""

import html.parser
import json
import re
import shutil
import struct
import subprocess
import sys
import urllib.parse

import harness

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NASTY = ['</script><script>document.title="owned"</script>', '"><img src=x onerror=document.title="owned">', "it's & <b>",
         "bidi\u202etxt.gnp", "{{}}`${1}`", "a.\u0001b", "<!--"]


# Each text with its contrast to the background, by the formulas of WCAG 2. Colors are read back from a canvas.
CONTRAST = """
  const context = Object.assign(document.createElement("canvas"), {width: 1, height: 1}).getContext("2d", {willReadFrequently: true});
  const over = (color, below) => {
    context.fillStyle = `rgb(${below})`; context.fillRect(0, 0, 1, 1);
    context.fillStyle = color; context.fillRect(0, 0, 1, 1);
    return [...context.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = (rgb) => rgb.map((v) => v / 255).map((v) => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const contrast = (a, b) => (Math.max(light(a), light(b)) + .05) / (Math.min(light(a), light(b)) + .05);
  const bar = getComputedStyle(document.documentElement).getPropertyValue("--bar");
  const backgrounds = (e) => {
    if (!e) return [[255, 255, 255]];
    const style = getComputedStyle(e), below = backgrounds(e.parentElement);
    const here = below.map((b) => over(style.backgroundColor, b));
    return style.backgroundImage === "none" ? here : [...here, over(bar, here[0])];
  };
  const found = {};
  for (const e of document.querySelectorAll("body *")) {
    const text = [...e.childNodes].filter((n) => n.nodeType === 3 && n.data.trim()).map((n) => n.data.trim())[0];
    if (!text || !e.getClientRects().length || /^(TITLE|SCRIPT|STYLE)$/i.test(e.tagName)) continue;
    const style = getComputedStyle(e), svg = e.ownerSVGElement, rect = svg && e.matches(".in") && e.parentNode.querySelector("rect");
    let behind = backgrounds(svg ? svg.parentElement : e);
    if (rect) {
      const fill = getComputedStyle(rect), [r, g, b] = over(fill.fill, [0, 0, 0]);
      behind = behind.map((c) => over(`rgba(${r},${g},${b},${fill.fillOpacity})`, c));
    }
    for (const b of behind) {
      const color = over(svg ? style.fill : style.color, b), ratio = contrast(color, b);
      found[`${e.tagName}.${e.className.baseVal ?? e.className}`] = Math.min(found[`${e.tagName}.${e.className.baseVal ?? e.className}`] ?? 99, ratio);
    }
  }
  return {dark: matchMedia("(prefers-color-scheme: dark)").matches, found};
"""


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
                           capture_output=True, text=True, timeout=harness.HANG)
        self.assertEqual(p.returncode, 0, p.stderr)
        errors = [line for line in p.stderr.splitlines() if "CONSOLE" in line]
        self.assertEqual(errors, [])
        return Elements(p.stdout)

    def probe(self, text, script, fragment=None, *flags):
        """What a function of the page returns, called after its own script has run."""
        text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
        script = "<script>document.title = JSON.stringify((() => {" + script + "})());</script></body>"
        with open(self.path("page.html"), "w", encoding="utf-8") as f:
            f.write(text.replace("</body>", script))
        return json.loads(self.browse(fragment, *flags).all("title")[0][2])

    def safetensors(self, tensors):
        """A file of float32 tensors."""
        header, data = {}, b""
        for name, values in tensors:
            header[name] = {"dtype": "F32", "shape": [len(values)], "data_offsets": [len(data), len(data) + 4 * len(values)]}
            data += struct.pack("<%df" % len(values), *values)
        header = json.dumps(header).encode()
        with open(self.path("model.safetensors"), "wb") as f:
            f.write(struct.pack("<Q", len(header)) + header + data)
        return "model.safetensors"

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
        for names, stats in ((NASTY, False), (["model." + n for n in NASTY], True)):
            text = self.page(self.safetensors([(n, [0, float("nan")]) for n in names]), *["--stats"] * stats)
            page = self.browse()
            self.assertEqual(page.all("title")[0][2], "model.safetensors · fsdpckpt")
            self.assertEqual((len(page.all("script")), len(page.all("img")), len(page.all("b"))), (2, 0, len(names) * stats))
            self.assertEqual(len(page.all("details", class_="leaf")), len(names))
            self.assertNotIn("\u202e", text)
            self.assertIn("bidi\\u202etxt.gnp", text)

    def test_content_policy_blocks_foreign_scripts(self):
        text = self.page(harness.corpus("dcp-torch2.15.0-fsdp2"))
        with open(self.path("page.html"), "w", encoding="utf-8") as f:
            f.write(text.replace("</main>", "</main><script>document.title='owned'</script>"))
        p = subprocess.run([BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=2000", "--dump-dom",
                            "--user-data-dir=" + self.path("chromium"), "file://" + self.path("page.html")],
                           capture_output=True, text=True, timeout=harness.HANG)
        self.assertNotIn("<title>owned", p.stdout)
        self.assertIn('class="mesh"', p.stdout)  # the page's own script ran

    def test_phone_width(self):
        """The page is no wider than a phone. Only pictures scroll, each in its own box."""
        many = [(f"layers.{i}.{'z' * 60}", [float(i), 1, 2, float("nan")]) for i in range(12)]
        for source, args in ((harness.corpus("dcp-torch2.15.0-hsdp-tp"), ["--stats"]),
                             (self.schema([("x" * 200, [4] * 8), ("a.b." + "y" * 90, [4])]), []),
                             (self.safetensors(many), ["--stats"])):
            wide, window = self.probe(self.page(source, *args), """
              document.querySelectorAll("details").forEach((d) => { d.open = true; });
              return [document.documentElement.scrollWidth, innerWidth];""", None, "--window-size=390,900")
            self.assertLessEqual(wide, window)
            self.assertLessEqual(window, 500)
        # The numbers of each layer are next to its name, with their titles, and nothing of the table is outside of its box.
        cut, cells, title = self.probe(self.page(self.safetensors(many), "--stats"), """
          document.querySelectorAll("details").forEach((d) => { d.open = true; });
          document.querySelectorAll(".leaf").forEach((d) => d.dispatchEvent(new Event("toggle", { bubbles: true })));
          const box = document.querySelector(".each").parentNode, edge = box.getBoundingClientRect().right;
          const cells = [...box.querySelectorAll("tbody th, tbody td")];
          return [cells.filter((c) => c.getBoundingClientRect().right > edge + 1).length, cells.length,
                  getComputedStyle(box.querySelector("td.num"), "::before").content];""", None, "--window-size=390,900")
        self.assertEqual((cut, cells), (0, 12 * 9))
        self.assertIn(title, ('attr(data-title) " "', '"Mean" " "', '"Mean "'))

    def test_statistics(self):
        values = {f"layers.{i}.w": [i + x / 8 for x in range(-8, 9)] for i in range(12)}
        values["norm"] = [1.0, 1.0, float("nan"), float("inf")]
        self.page(self.safetensors(values.items()), "--stats")
        page = self.browse({"open": "layers.{0..11}.w"})
        self.assertIn("1 NaN, 1 infinite", [e[2] for e in page.all("dd")])
        rows = [[td[2] for td in page.all("th", class_="name", scope="row")][i] for i in range(12)]
        self.assertEqual(rows, [f"layers.{i}.w" for i in range(12)])  # 10 after 9, each with its own numbers
        text = page.all("table", class_="each")[0][2]
        for i, name in enumerate(rows):
            after = text[text.index(name) + len(name):]
            self.assertTrue(after.startswith(f"{i}0.6124{i - 1}{i + 1}"), after[:40])
        self.assertEqual([e[1]["aria-label"] for e in page.all("svg", class_="histogram")], ["Histogram from -1 to 12"])
        self.assertEqual(len([e for e in page.all("b", class_="bad")]), 2)
        self.page(self.safetensors(values.items()))
        self.assertEqual(self.browse({"open": "norm"}).all("svg", class_="histogram"), [])

    def test_three_sharded_dimensions_are_drawn(self):
        source = harness.corpus("dcp-torch2.15.0-dtypes")
        text = self.page(source)
        data = {"mesh": [2, 2, 2], "stored": [], "held": [], "kinds": [
            {"s": [4, 6, 8], "a": [{"n": 2, "step": 2}, {"n": 2, "step": 3}, {"n": 2, "step": 4}], "r": 1}]}
        text = re.sub(r'(id="data">).*?(</script>)', lambda m: m[1] + json.dumps(data) + m[2], text, flags=re.S)
        text = re.sub(r'data-k="\d+" data-s="0"', 'data-k="0" data-s="0"', text)
        said = self.probe(text, """
          const leaf = [...document.querySelectorAll(".leaf")].find((l) => l.dataset.k === "0");
          leaf.open = true; leaf.dispatchEvent(new Event("toggle"));
          return [...leaf.querySelectorAll("figure")].map((f) => [f.querySelector("figcaption").textContent,
            f.querySelector("svg").getAttribute("aria-label")]);""")
        self.assertEqual([caption for caption, _ in said], ["dim 0: 0:2", "dim 0: 2:4"])
        # torch numbers the ranks of a mesh in row-major order
        self.assertIn("rank 3 has [0:2, 3:6, 4:8]", said[0][1])
        self.assertIn("rank 4 has [2:4, 0:3, 0:4]", said[1][1])

    def test_keyboard_moves_in_the_tree(self):
        names = [f"layers.{i}.{n}" for i in range(3) for n in ("attn.wq", "attn.wo")] + ["embed", "norm"]
        text = self.page(self.schema([(n, [4 + i]) for i, n in enumerate(names)]))  # all of them differ: nothing is folded
        got = self.probe(text, """
          const tree = document.getElementById("tree"), where = [];
          const item = () => document.activeElement;
          const press = (...keys) => keys.forEach((key) => item().dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true})));
          const note = () => where.push([item().querySelector(".name").textContent, item().getAttribute("aria-level"),
            item().parentElement.open]);
          tree.querySelector("[role=treeitem][tabindex='0']").focus(); note();
          press("End"); note();
          press("ArrowUp"); press("Home"); press("l"); note();
          press("ArrowLeft"); note();
          press("ArrowRight"); note();
          press("ArrowRight"); note();
          press("ArrowLeft", "ArrowLeft"); note();
          press("n"); note();
          return {where, tabs: tree.querySelectorAll("[tabindex='0']").length, role: tree.getAttribute("role"),
            items: [...tree.querySelectorAll("summary")].every((s) => s.getAttribute("role") === "treeitem" || !s.checkVisibility())};""")
        self.assertEqual([w[0] for w in got["where"]], ["embed", "norm", "layers", "layers", "layers", "0.attn", "layers", "norm"])
        self.assertEqual([w[2] for w in got["where"]], [False, False, True, False, True, True, True, False])
        self.assertEqual([w[1] for w in got["where"]], ["1", "1", "1", "1", "1", "2", "1", "1"])
        self.assertEqual((got["tabs"], got["role"], got["items"]), (1, "tree", True))

    def test_contrast(self):
        text = self.page(harness.corpus("dcp-torch2.15.0-hsdp-tp"), "--stats")
        fragment = {"open": "model.layers.0.attention.wo.weight", "rank": 5}
        for dark in (False, True):
            got = self.probe(text, CONTRAST, fragment, *["--blink-settings=preferredColorScheme=0"] * dark)
            self.assertEqual(got["dark"], dark)
            self.assertGreater(len(got["found"]), 15)
            self.assertEqual({k: v for k, v in got["found"].items() if v < 4.5}, {})

    def test_many_tensors(self):
        """10,000 lines that cannot be folded. The page is small enough to open, and holds each of them."""
        text = self.page(self.schema([(f"block{i % 100}.part{i // 100}.w_{i}", [i + 1]) for i in range(10000)]))
        self.assertLess(len(text), 6e6)
        self.assertEqual(len(self.browse({"search": "w_4711"}).all("details", class_="leaf")), 10000)


if __name__ == "__main__":
    if BROWSER is None:
        print("no Chromium: skipped")
        sys.exit(77)
    harness.main()

"""Reads an HDF5 file by the HDF5 File Format Specification 3.0 alone, and accounts for each of its bytes once.

    walk = h5_walk.Walk(bytes_of_the_file)     raises h5_parts.Wrong
    walk.kinds                                 {kind of part: number of parts}

h5_spec.py has the fields of each structure. Each part (superblock, object header, heap, tree, data) takes its bytes; taking a
byte twice is an error. What no part takes must be zeros, fewer than a page in a row. Only what fsdpckpt writes is understood:
superblock 2, object headers 2, groups with links in the header or in a fractal heap with B-trees 2, attributes of fixed size and
strings in global heaps, contiguous, virtual and external datasets, and chunks in a B-tree of version 1. Uses only Python's standard library.
"""

import collections
import itertools
import struct

import h5_spec
from h5_parts import UNDEFINED, Part, lookup3, must

PAGE = 4096


class Walk:
    def __init__(self, data):
        self.data, self.taken = data, bytearray(len(data))
        self.kinds, self.heaps = collections.Counter(), {}
        self.chunk_children = 64
        part = self.part("superblock", 0, 48)
        extension, end, root = list(h5_spec.read(part, "superblock").values())[-3:]
        self.checksum(part, 0)
        must(end == len(data), "the superblock says %d bytes, the file has %d", end, len(data))
        if extension != UNDEFINED:
            self.object(extension)
        self.object(root)
        self.check_heaps()
        self.check_gaps()

    def part(self, kind, at, size):
        part = Part(self.data, at, size)
        must(not any(self.taken[at:at + size]), "%s: bytes from %d to %d are part of something else", kind, at, at + size)
        self.taken[at:at + size] = b"\1" * size
        self.kinds[kind] += 1
        return part

    def checksum(self, part, start):
        at = part.at
        must(part.u(4) == lookup3(self.data[start:at]), "the checksum at %d is wrong", at)

    def check_gaps(self):
        at = 0
        while (at := self.taken.find(b"\0", at)) >= 0:
            end = self.taken.find(b"\1", at)
            end = len(self.taken) if end < 0 else end
            must(end - at < PAGE and not any(self.data[at:end]), "bytes %d to %d belong to nothing", at, end)
            at = end

    # ---- global heaps ----

    def heap_object(self, collection, number, size):
        if collection not in self.heaps:
            self.heaps[collection] = self.read_heap(collection)
        objects = self.heaps[collection]
        must(number in objects, "the heap at %d has no object %d", collection, number)
        found, data = objects[number]
        must(not found and len(data) == size, "heap %d, object %d: used twice, or %d bytes and not %d", collection, number,
             len(data), size)
        objects[number] = True, data
        return data

    def read_heap(self, at):
        size = struct.unpack_from("<Q", self.data, at + 8)[0]
        part, objects = self.part("global heap", at, size), {}
        h5_spec.read(part, "global heap collection")
        while part.end - part.at >= 16:
            number, _, _, length = h5_spec.read(part, "global heap object").values()
            if number == 0:
                must(length == part.end - part.at + 16, "free space in the heap at %d", at)
                must(not any(part.take(length - 16)), "free space of the heap at %d", at)
                break
            must(number not in objects, "two objects %d in the heap at %d", number, at)
            objects[number] = False, part.take(length)
            must(not any(part.take(-length % 8)), "padding in the heap at %d", at)
        must(not any(part.take(part.end - part.at)), "the end of the heap at %d", at)
        return objects

    def check_heaps(self):
        for at, objects in self.heaps.items():
            for number, (found, _) in objects.items():
                must(found, "nothing refers to object %d of the heap at %d", number, at)

    # ---- object headers ----

    def object(self, at):
        head = Part(self.data, at, 10)
        size = h5_spec.read(head, "object header prefix")["Size of Chunk #0"]
        part = self.part("object header", at, 10 + size + 4)
        part.take(10)
        messages = collections.defaultdict(list)
        while part.at < part.end - 4:
            kind, length, how = h5_spec.read(part, "object header message").values()
            must(how == {3: 1, 21: 4}.get(kind, 0) and length <= part.end - 4 - part.at, "a message at %d", part.at - 4)
            messages[kind].append(Part(self.data, part.at, length))
            part.take(length)
        self.checksum(part, at)
        kinds = list(messages)
        must((21 in kinds) == (12 in kinds) and len(messages[21]) <= 1, "attribute info in the object header at %d", at)
        must(21 not in kinds or kinds.index(21) < kinds.index(12), "attribute info behind attributes at %d", at)
        self.messages(at, messages)

    def messages(self, at, messages):
        known = {1: self.space, 3: self.type, 5: self.fill, 11: self.filters, 12: self.attribute, 10: self.group_info,
                 19: self.tree_sizes, 6: self.link, 21: self.attribute_info}
        shape = element = None
        links, files = [], None
        for kind, parts in messages.items():
            for part in parts:
                if kind in (2, 7, 8):
                    continue
                must(kind in known, "object header at %d: message %d", at, kind)
                found = known[kind](part)
                part.done()
                shape, element = (found, element) if kind == 1 else (shape, found) if kind == 3 else (shape, element)
                links += [found] if kind == 6 else []
        for part in messages[7]:
            files = self.files(part)
        for part in messages[8]:
            self.layout(part, shape, element[0], files)
        for part in messages[2]:
            links += self.link_info(part, len(links))
        must(sorted(order for order, _ in links) == list(range(len(links))), "creation order in the group at %d", at)
        for _, address in links:
            self.object(address)

    def space(self, part):
        _, ndim, _, kind = h5_spec.read(part, "dataspace").values()
        must(kind == (ndim > 0), "dataspace at %d", part.at)
        return [part.u(8) for _ in range(ndim)]

    def type(self, part):
        """Bytes of an element, and what follows them: nothing, a string, a reference."""
        word, size = part.u(4), part.u(4)
        kind, version = word & 15, word >> 4 & 15
        must(1 <= version <= 3, "datatype at %d", part.at)
        if kind in (0, 4):
            part.take(4)
        elif kind == 1:
            part.take(12)
        elif kind == 5:
            part.take(word >> 8 & 0xff)
        elif kind == 6:
            for _ in range(word >> 8 & 0xffff):
                self.member(part, version, size)
        elif kind == 8:
            self.type(part)
            for _ in range(word >> 8 & 0xffff):
                self.name(part, version)
            part.take((word >> 8 & 0xffff) * size)
        elif kind == 9:
            must(self.type(part)[0] == 1, "variable-length datatype at %d", part.at)
        elif kind == 10:
            dims = part.u(1)
            part.take(4 * dims if version == 3 else 3 + 8 * dims)
            self.type(part)
        else:
            must(kind in (3, 7), "datatype %d at %d", kind, part.at)
        return size, {9: "string", 7: "reference"}.get(kind)

    def name(self, part, version):
        end = part.data.index(b"\0", part.at) + 1
        part.take((end - part.at + 7) // 8 * 8 if version < 3 else end - part.at)

    def member(self, part, version, size):
        self.name(part, version)
        if version == 3:
            part.take(1 if size < 256 else 2 if size < 65536 else 4)
        else:
            part.take(4 if version == 2 else 4 + 1 + 3 + 4 + 4 + 16)
        self.type(part)

    def fill(self, part):
        flags = h5_spec.read(part, "fill value")["Flags"]
        must(flags in (0x05, 0x06, 0x07, 0x0a, 0x2a), "fill value at %d", part.at)  # early, late and incremental allocation
        if flags & 0x20:
            part.take(part.u(4))

    def filters(self, part):
        for _ in range(h5_spec.read(part, "filter pipeline")["Number of Filters"]):
            h5_spec.read(part, "filter")

    def group_info(self, part):
        h5_spec.read(part, "group info")

    def tree_sizes(self, part):
        self.chunk_children = 2 * h5_spec.read(part, "B-tree 'K' values")["Indexed Storage Internal Node K"]

    def attribute_info(self, part):
        h5_spec.read(part, "attribute info")

    def attribute(self, part):
        sizes = list(h5_spec.read(part, "attribute").values())[2:5]
        must(part.take(sizes[0])[-1:] == b"\0", "attribute at %d", part.at)
        name = self.data[part.at - sizes[0]:part.at - 1]
        kind, shape = Part(self.data, part.at, sizes[1]), Part(self.data, part.at + sizes[1], sizes[2])
        element, what = self.type(kind)
        count = 1
        for dim in self.space(shape):
            count *= dim
        kind.done()
        shape.done()
        part.take(sizes[1] + sizes[2])
        for _ in range(count):
            if what == "string":
                size, collection, number = part.u(4), part.u(8), part.u(4)
                must((size == 0) == (collection == 0), "attribute %r", name)
                if size:
                    self.heap_object(collection, number, size)
            elif what == "reference":
                self.object(part.u(8))
            else:
                part.take(element)

    # ---- data ----

    def files(self, part):
        _, _, count, used, at = h5_spec.read(part, "external data files").values()
        must(used == count, "external files at %d", part.at)
        slots = [tuple(h5_spec.read(part, "external data file slot").values()) for _ in range(count)]
        part.done()
        heap = self.part("local heap", at, 32)
        fields = h5_spec.read(heap, "local heap")
        size, address = fields["Data Segment Size"], fields["Address of Data Segment"]
        names = self.part("names in a local heap", address, size).take(size)
        for name, _, length in slots:
            must(0 < name < size and b"\0" in names[name:] and length > 0, "external file at %d", part.at)
        used = {name for name, _, _ in slots} | {0}
        must(len([n for n in names.split(b"\0") if n]) == len(used) - 1, "names in the local heap at %d", at)
        return sum(length for _, _, length in slots)

    def layout(self, part, shape, element, files):
        kind = self.data[part.at + 1]
        bytes_of_all = element
        for dim in shape:
            bytes_of_all *= dim
        if kind == 1:
            _, _, address, size = h5_spec.read(part, "contiguous data layout").values()
            must(size == bytes_of_all and (address == UNDEFINED) == (size == 0 or files is not None),
                 "layout at %d", part.at)
            must(files in (None, size), "external files of %s bytes at %d", files, part.at)
            if address != UNDEFINED:
                self.part("data", address, size)
        elif kind == 3:
            fields = h5_spec.read(part, "virtual data layout")
            self.mappings(fields["Address"], fields["Index"])
        else:
            _, _, ndim, address = h5_spec.read(part, "chunked data layout").values()
            must(ndim == len(shape) + 1, "layout at %d", part.at)
            chunk = [part.u(4) for _ in range(len(shape) + 1)]
            must(chunk[-1] == element, "layout at %d", part.at)
            self.chunks(address, shape, chunk)
        part.done()

    def mappings(self, collection, number):
        if collection not in self.heaps:
            self.heaps[collection] = self.read_heap(collection)
        data = self.heaps[collection][number][1]
        self.heap_object(collection, number, len(data))
        part = Part(data, 0, len(data))
        for _ in range(h5_spec.read(part, "virtual datasets' global heap block")["Num Entries"]):
            for _ in range(2):
                part.take(part.data.index(b"\0", part.at) + 1 - part.at)
            self.selection(part)
            self.selection(part)
        must(part.u(4) == lookup3(data[:-4]), "checksum of mappings")
        part.done()

    def selection(self, part):
        kind, version = part.u(4), part.u(4)
        if kind == 3:
            must(version == 1 and part.u(8) == 0, "selection of all")
        elif version == 1:
            must(kind == 2 and part.u(4) == 0, "selection")
            rest = Part(part.data, part.at + 4, part.u(4))
            ndim, blocks = rest.u(4), rest.u(4)
            for _ in range(2 * ndim * blocks):
                rest.u(4)
            rest.done()
            part.at = rest.at
        else:
            must(kind == version == 2 and part.u(1) == 1, "selection")
            rest = Part(part.data, part.at + 4, part.u(4))
            rest.take(32 * rest.u(4))
            rest.done()
            part.at = rest.at

    def chunks(self, address, shape, chunk):
        level, expected, ends, below = None, None, None, [address]
        while True:
            nodes = [self.chunk_node(at, level, chunk, below[i - 1:i], below[i + 1:i + 2]) for i, at in enumerate(below)]
            level = nodes[0][0]
            keys = [key for node in nodes for key in node[1][:-1]] + [nodes[-1][1][-1]]
            must(all(a[1][-1] == b[1][0] for a, b in zip(nodes, nodes[1:])), "keys between chunk nodes at %d", below[0])
            must(expected in (None, [node[1][0] for node in nodes]) and ends in (None, keys[-1]),
                 "keys of the chunk nodes at %d and their parents", below[0])
            expected, ends, below = keys[:-1], keys[-1], [child for node in nodes for child in node[2]]
            if level == 0:
                break
            level -= 1
        places = itertools.product(*(range(0, n, c) for n, c in zip(shape, chunk)))
        places = list(places)
        must(len(places) == len(below), "%d chunks, not %d", len(below), len(places))
        for (size, _, place), at, wanted in zip(expected, below, places):
            must(place == [*wanted, 0], "the chunk at %d is that of %s, not of %s", at, place, wanted)
            self.part("chunk", at, size)

    def chunk_node(self, at, level, chunk, before, after):
        """Level, keys, children."""
        key_size = 8 + 8 * len(chunk)
        part = self.part("chunk node", at, 24 + self.chunk_children * 8 + (self.chunk_children + 1) * key_size)
        _, _, found, used, left, right = h5_spec.read(part, "version 1 B-tree node").values()
        must(level in (None, found) and 1 <= used <= self.chunk_children, "chunk node at %d", at)
        must((left, right) == tuple((*side, UNDEFINED)[0] for side in (before, after)),
             "siblings of the chunk node at %d", at)
        keys, children = [], []
        for i in range(used + 1):
            keys.append((part.u(4), part.u(4), [part.u(8) for _ in chunk]))
            children += [part.u(8)] if i < used else []
        must(all(a[2] < b[2] for a, b in zip(keys, keys[1:])), "keys of the chunk node at %d", at)
        must(not any(part.take(part.end - part.at)), "the end of the chunk node at %d", at)
        return found, keys, children

    # ---- groups ----

    def link(self, part):
        _, flags, order, _ = h5_spec.read(part, "link").values()
        must(flags & ~3 == 0x14, "link at %d", part.at)  # creation order and character set are present
        must(part.take(part.u(1 << (flags & 3))) != b"", "link at %d has no name", part.at)
        return order, part.u(8)

    def link_info(self, part, links):
        _, _, count, heap, names, orders = h5_spec.read(part, "link info").values()
        part.done()
        if heap == UNDEFINED:
            must(names == orders == UNDEFINED and count == links, "link info at %d", part.at)
            return []
        must(links == 0, "links in the header and in a heap")
        header, blocks, size = self.fractal_heap(heap)
        found, spans = [], []
        for kind, tree in ((5, names), (6, orders)):
            records = self.tree(tree, kind)
            must(len(records) == count, "the tree at %d has %d records, not %d", tree, len(records), count)
            ids = []
            for number, record in enumerate(records):
                key, (offset, length) = record[:-7], struct.unpack("<xIH", record[-7:])
                must(record[-7] == 0, "a heap ID in the tree at %d", tree)
                link = Part(self.data, blocks[offset // size] + offset % size, length)
                name_at = link.at + 11 + (1 << (self.data[link.at + 1] & 3))
                order, address = self.link(link)
                link.done()
                hashed = struct.pack("<I", lookup3(self.data[name_at:link.end - 8]))
                must(key == (hashed if kind == 5 else struct.pack("<Q", order)), "record %d of the tree at %d", number, tree)
                ids.append((offset, length))
                found += [(order, address)] if kind == 6 else []
            must(len(set(ids)) == count, "the tree at %d has a link twice", tree)
            keys = [int.from_bytes(r[:-7], "little") for r in records]
            must(keys == sorted(keys), "the tree at %d is not in order", tree)
            spans = sorted(ids)
        self.check_blocks(blocks, size, spans)
        h5_spec.check_managed_space(header, len(blocks), sum(length for _, length in spans), count)
        return found

    def check_blocks(self, blocks, size, spans):
        """The links fill the blocks, and zeros follow them."""
        at = {i: 21 for i in range(len(blocks))}
        for offset, length in spans:
            block = offset // size
            must(offset % size == at[block], "a gap in a fractal heap at %d", blocks[block] + at[block])
            at[block] += length
        for block, end in at.items():
            must(not any(self.data[blocks[block] + end:blocks[block] + size]), "the end of the heap block at %d", blocks[block])

    def fractal_heap(self, at):
        part = self.part("fractal heap", at, 146)
        heap = h5_spec.read(part, "fractal heap")
        self.checksum(part, at)
        must(heap["Address of Managed Block Free Space Manager"] == UNDEFINED, "free space of the fractal heap at %d", at)
        must(heap["Maximum Size of Managed Objects"] in (4096, 65536 - 21), "largest object in the fractal heap at %d", at)
        rows, root, size = (heap[k] for k in ("Current # of Rows in Root Indirect Block", "Address of Root Block",
                                              "Starting Block Size"))
        must(rows <= 1, "rows of the fractal heap at %d", at)
        blocks = self.indirect(root, at, heap["Table Width"]) if rows else [root]
        for i, block in enumerate(blocks):
            direct = self.part("fractal heap block", block, size)
            fields = h5_spec.read(direct, "fractal heap direct block")
            must((fields["Heap Header Address"], fields["Block Offset"]) == (at, i * size), "the heap block at %d", block)
            zeroed = self.data[block:block + 17] + bytes(4) + self.data[block + 21:block + size]
            must(direct.u(4) == lookup3(zeroed), "checksum of the heap block at %d", block)
        return heap, blocks, size

    def indirect(self, at, heap, width):
        part = self.part("fractal heap list", at, 5 + 8 + 4 + 8 * width + 4)
        must(h5_spec.read(part, "fractal heap indirect block")["Heap Header Address"] == heap, "the heap list at %d", at)
        blocks = [part.u(8) for _ in range(width)]
        self.checksum(part, at)
        return [b for b in blocks if b != UNDEFINED]

    def tree(self, at, kind):
        part = self.part("B-tree", at, 38)
        _, _, found, node, width, depth, _, _, root, in_root, total = h5_spec.read(part, "version 2 B-tree header").values()
        self.checksum(part, at)
        must(found == kind and width == (11 if kind == 5 else 15) and depth <= 1, "B-tree at %d", at)
        records = self.node(root, kind, node, width, in_root, depth)
        must(len(records) == total, "B-tree at %d", at)
        return records

    def node(self, at, kind, size, width, count, depth):
        part = self.part("B-tree node", at, size)
        fields = h5_spec.read(part, "version 2 B-tree %s node" % ("internal" if depth else "leaf"))
        must(fields["Type"] == kind, "B-tree node at %d", at)
        records = [part.take(width) for _ in range(count)]
        children = [(part.u(8), part.u(2)) for _ in range(count + 1)] if depth else []
        self.checksum(part, at)
        must(not any(part.take(part.end - part.at)), "the end of the B-tree node at %d", at)
        out = []
        for i, (child, held) in enumerate(children):
            out += self.node(child, kind, size, width, held, 0) + records[i:i + 1]
        return out if depth else records

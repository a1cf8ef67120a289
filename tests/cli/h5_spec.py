"""Structures of HDF5 as tables of fields: (field, bytes, value), with the section of the HDF5 File Format Specification 3.0
that describes each structure. A value of None is not fixed: h5_walk.py computes what it must be, or uses it.
"""

from h5_parts import UNDEFINED, must

STRUCTURES = {
    "attribute info": ("IV.A.2.v", (
        ("Version", 1, 0),
        ("Flags", 1, 0),  # creation order is neither tracked nor indexed
        ("Fractal Heap Address", 8, UNDEFINED),  # the attributes are in the object header
        ("Attribute Name v2 B-tree Address", 8, UNDEFINED),
    )),
    "fractal heap": ("III.G", (
        ("Signature", 4, b"FRHP"),
        ("Version", 1, 0),
        ("Heap ID Length", 2, 7),
        ("I/O Filters' Encoded Length", 2, 0),
        ("Flags", 1, 2),  # the direct blocks have checksums
        ("Maximum Size of Managed Objects", 4, None),
        ("Next Huge Object ID", 8, 0),
        ("v2 B-tree Address of Huge Objects", 8, UNDEFINED),
        ("Amount of Free Space in Managed Blocks", 8, None),
        ("Address of Managed Block Free Space Manager", 8, None),
        ("Amount of Managed Space in Heap", 8, None),
        ("Amount of Allocated Managed Space in Heap", 8, None),
        ("Offset of Direct Block Allocation Iterator in Managed Space", 8, None),
        ("Number of Managed Objects in Heap", 8, None),
        ("Size of Huge Objects in Heap", 8, 0),
        ("Number of Huge Objects in Heap", 8, 0),
        ("Size of Tiny Objects in Heap", 8, 0),
        ("Number of Tiny Objects in Heap", 8, 0),
        ("Table Width", 2, None),
        ("Starting Block Size", 8, None),
        ("Maximum Direct Block Size", 8, 65536),
        ("Maximum Heap Size", 2, 32),
        ("Starting # of Rows in Root Indirect Block", 2, 1),
        ("Address of Root Block", 8, None),
        ("Current # of Rows in Root Indirect Block", 2, None),
    )),
    "fractal heap direct block": ("III.G", (
        ("Signature", 4, b"FHDB"),
        ("Version", 1, 0),
        ("Heap Header Address", 8, None),
        ("Block Offset", 4, None),
    )),
    "fractal heap indirect block": ("III.G", (
        ("Signature", 4, b"FHIB"),
        ("Version", 1, 0),
        ("Heap Header Address", 8, None),
        ("Block Offset", 4, 0),
    )),
}


def read(part, structure):
    """Reads the fields of a structure. @return {field: number}"""
    section, fields = STRUCTURES[structure]
    found = {}
    for field, size, value in fields:
        at, raw = part.at, part.take(size)
        number = found[field] = int.from_bytes(raw, "little")
        must(value is None or (raw if isinstance(value, bytes) else number) == value,
             "%s (section %s) at %d: %s is %d", structure, section, at, field, number)
    return found


def check_managed_space(heap, blocks, used, objects):
    """The numbers in the header of a fractal heap that has blocks of one size, by how libhdf5 counts: all blocks for which
    the root has entries are managed space and have free space, allocated or not. test_h5_bytes compares with libhdf5's files."""
    rows, size = heap["Current # of Rows in Root Indirect Block"], heap["Starting Block Size"]
    managed = rows * heap["Table Width"] if rows else 1
    wanted = {
        "Amount of Free Space in Managed Blocks": managed * (size - 21) - used,
        "Amount of Managed Space in Heap": managed * size,
        "Amount of Allocated Managed Space in Heap": blocks * size,
        "Offset of Direct Block Allocation Iterator in Managed Space": blocks * size if rows else 0,
        "Number of Managed Objects in Heap": objects,
    }
    for field, value in wanted.items():
        must(heap[field] == value, "fractal heap: %s is %d, not %d", field, heap[field], value)

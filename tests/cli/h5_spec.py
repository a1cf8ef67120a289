"""Structures of HDF5 as tables of fields: (field, bytes, value), with the section of the HDF5 File Format Specification 3.0
that describes each structure. A value of None is not fixed: h5_walk.py computes what it must be, or uses it.
"""

from h5_parts import UNDEFINED, must

STRUCTURES = {
    "superblock": ("II.A, version 2", (
        ("Format Signature", 8, b"\x89HDF\r\n\x1a\n"),
        ("Version Number of Superblock", 1, 2),
        ("Size of Offsets", 1, 8),
        ("Size of Lengths", 1, 8),
        ("File Consistency Flags", 1, 0),
        ("Base Address", 8, 0),
        ("Superblock Extension Address", 8, None),
        ("End of File Address", 8, None),
        ("Root Group Object Header Address", 8, None),
    )),
    "version 1 B-tree node": ("III.A.1", (
        ("Signature", 4, b"TREE"),
        ("Node Type", 1, 1),  # raw data chunks
        ("Node Level", 1, None),
        ("Entries Used", 2, None),
        ("Address of Left Sibling", 8, None),
        ("Address of Right Sibling", 8, None),
    )),
    "version 2 B-tree header": ("III.A.2", (
        ("Signature", 4, b"BTHD"),
        ("Version", 1, 0),
        ("Type", 1, None),  # 5: names of links, 6: their creation order
        ("Node Size", 4, None),
        ("Record Size", 2, None),
        ("Depth", 2, None),
        ("Split Percent", 1, 100),  # as libhdf5 sets them for groups
        ("Merge Percent", 1, 40),
        ("Root Node Address", 8, None),
        ("Number of Records in Root Node", 2, None),
        ("Total Number of Records in B-tree", 8, None),
    )),
    "version 2 B-tree leaf node": ("III.A.2", (("Signature", 4, b"BTLF"), ("Version", 1, 0), ("Type", 1, None))),
    "version 2 B-tree internal node": ("III.A.2", (("Signature", 4, b"BTIN"), ("Version", 1, 0), ("Type", 1, None))),
    "local heap": ("III.D", (
        ("Signature", 4, b"HEAP"),
        ("Version", 1, 0),
        ("Reserved", 3, 0),
        ("Data Segment Size", 8, None),
        ("Offset to Head of Free-list", 8, 1),  # none
        ("Address of Data Segment", 8, None),
    )),
    "global heap collection": ("III.E", (
        ("Magic Number", 4, b"GCOL"),
        ("Version", 1, 1),
        ("Reserved", 3, 0),
        ("Collection Size", 8, None),
    )),
    "global heap object": ("III.E", (
        ("Heap Object Index", 2, None),
        ("Reference Count", 2, 0),
        ("Reserved", 4, 0),
        ("Object Size", 8, None),
    )),
    "virtual datasets' global heap block": ("III.F", (("Version", 1, 0), ("Num Entries", 8, None))),
    "object header prefix": ("IV.A.1.b", (
        ("Signature", 4, b"OHDR"),
        ("Version", 1, 2),
        ("Flags", 1, 2),  # 4 bytes of size; no times, no creation order of attributes, no limits for attributes
        ("Size of Chunk #0", 4, None),
    )),
    "object header message": ("IV.A.1.b", (
        ("Header Message Type", 1, None),
        ("Size of Header Message Data", 2, None),
        ("Header Message Flags", 1, None),
    )),
    "dataspace": ("IV.A.2.b, version 2", (("Version", 1, 2), ("Dimensionality", 1, None), ("Flags", 1, 0), ("Type", 1, None))),
    "link info": ("IV.A.2.c", (
        ("Version", 1, 0),
        ("Flags", 1, 3),  # creation order is tracked and indexed
        ("Maximum Creation Index", 8, None),
        ("Fractal Heap Address", 8, None),
        ("Address of v2 B-tree for Name Index", 8, None),
        ("Address of v2 B-tree for Creation Order Index", 8, None),
    )),
    "fill value": ("IV.A.2.f, version 3", (("Version", 1, 3), ("Flags", 1, None))),
    "link": ("IV.A.2.g", (
        ("Version", 1, 1),
        ("Flags", 1, None),
        ("Creation Order", 8, None),
        ("Link Name Character Set", 1, 1),  # UTF-8
    )),
    "external data files": ("IV.A.2.h", (
        ("Version", 1, 1),
        ("Reserved", 3, 0),
        ("Allocated Slots", 2, None),
        ("Used Slots", 2, None),
        ("Heap Address", 8, None),
    )),
    "external data file slot": ("IV.A.2.h", (
        ("Name Offset in Local Heap", 8, None),
        ("Offset in External Data File", 8, None),
        ("Data Size in External File", 8, None),
    )),
    "contiguous data layout": ("IV.A.2.i, version 3", (
        ("Version", 1, 3),
        ("Layout Class", 1, 1),
        ("Address", 8, None),
        ("Size", 8, None),
    )),
    "chunked data layout": ("IV.A.2.i, version 3", (
        ("Version", 1, 3),
        ("Layout Class", 1, 2),
        ("Dimensionality", 1, None),
        ("Address", 8, None),
    )),
    "virtual data layout": ("IV.A.2.i, version 4", (
        ("Version", 1, 4),
        ("Layout Class", 1, 3),
        ("Address", 8, None),
        ("Index", 4, None),
    )),
    "group info": ("IV.A.2.k", (("Version", 1, 0), ("Flags", 1, 0))),
    "filter pipeline": ("IV.A.2.l, version 2", (("Version", 1, 2), ("Number of Filters", 1, None))),
    "filter": ("IV.A.2.l, version 2", (
        ("Filter Identification Value", 2, None),
        ("Flags", 2, 1),  # may be skipped
        ("Number Client Data Values", 2, 1),
        ("Client Data", 4, None),
    )),
    "attribute": ("IV.A.2.m, version 3", (
        ("Version", 1, 3),
        ("Flags", 1, 0),
        ("Name Size", 2, None),
        ("Datatype Size", 2, None),
        ("Dataspace Size", 2, None),
        ("Name Character Set Encoding", 1, 0),
    )),
    "B-tree 'K' values": ("IV.A.2.t", (
        ("Version", 1, 0),
        ("Indexed Storage Internal Node K", 2, None),
        ("Group Internal Node K", 2, 16),
        ("Group Leaf Node K", 2, 4),
    )),
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
    the root has entries are managed space and have free space, allocated or not. oracle.h5_keep_others
    compares with libhdf5's files."""
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

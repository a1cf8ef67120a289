/*
 * The opcodes that Python's pickle writes in protocols 2 to 5, and those of Python 2's strings. Python's pickletools
 * documents them.
 */
#pragma once

typedef enum fc_pickle_opcode {
    FC_PICKLE_MARK = '(',
    FC_PICKLE_STOP = '.',
    FC_PICKLE_POP = '0',
    FC_PICKLE_POP_MARK = '1',
    FC_PICKLE_BINFLOAT = 'G',
    FC_PICKLE_BININT = 'J',
    FC_PICKLE_BININT1 = 'K',
    FC_PICKLE_BININT2 = 'M',
    FC_PICKLE_NONE = 'N',
    FC_PICKLE_BINPERSID = 'Q', /**< takes the id */
    FC_PICKLE_REDUCE = 'R',    /**< takes the callee and a tuple */
    FC_PICKLE_BINSTRING = 'T',
    FC_PICKLE_SHORT_BINSTRING = 'U',
    FC_PICKLE_BINUNICODE = 'X',
    FC_PICKLE_APPEND = 'a',
    FC_PICKLE_BUILD = 'b', /**< takes the instance and its state */
    FC_PICKLE_GLOBAL = 'c',
    FC_PICKLE_EMPTY_DICT = '}',
    FC_PICKLE_APPENDS = 'e', /**< takes the items down to the mark */
    FC_PICKLE_BINGET = 'h',
    FC_PICKLE_LONG_BINGET = 'j',
    FC_PICKLE_EMPTY_LIST = ']',
    FC_PICKLE_BINPUT = 'q',
    FC_PICKLE_LONG_BINPUT = 'r',
    FC_PICKLE_SETITEM = 's',
    FC_PICKLE_TUPLE = 't', /**< takes the items down to the mark; below four items see fc_torch_pickle_tuple */
    FC_PICKLE_EMPTY_TUPLE = ')',
    FC_PICKLE_SETITEMS = 'u', /**< takes keys and values down to the mark */
    FC_PICKLE_PROTO = 0x80,
    FC_PICKLE_NEWOBJ = 0x81, /**< takes the class and a tuple */
    FC_PICKLE_TUPLE1 = 0x85,
    FC_PICKLE_TUPLE2 = 0x86,
    FC_PICKLE_TUPLE3 = 0x87,
    FC_PICKLE_NEWTRUE = 0x88,
    FC_PICKLE_NEWFALSE = 0x89,
    FC_PICKLE_LONG1 = 0x8a,
    FC_PICKLE_LONG4 = 0x8b,
    FC_PICKLE_BINBYTES = 'B',
    FC_PICKLE_SHORT_BINBYTES = 'C',
    FC_PICKLE_SHORT_BINUNICODE = 0x8c,
    FC_PICKLE_BINUNICODE8 = 0x8d,
    FC_PICKLE_BINBYTES8 = 0x8e,
    FC_PICKLE_EMPTY_SET = 0x8f,
    FC_PICKLE_ADDITEMS = 0x90,
    FC_PICKLE_FROZENSET = 0x91,
    FC_PICKLE_NEWOBJ_EX = 0x92,
    FC_PICKLE_STACK_GLOBAL = 0x93,
    FC_PICKLE_MEMOIZE = 0x94,
    FC_PICKLE_FRAME = 0x95,
    FC_PICKLE_BYTEARRAY8 = 0x96
} fc_pickle_opcode;

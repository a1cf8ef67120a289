/* The commands, in the order of --help: X(name) for each. Included more than once, so there is no guard. */
X(consolidate)
X(reshard)
X(inspect)
X(check)
X(schema)
X(diff)
X(verify)
X(units)

"""Files of other tools, one package for each tool.

Every package has `read.py`, and `write.py` where it writes; its docstring gives the tool's version, the source of the
format, and what is refused. `FORMATS` lists the kinds of files that are recognised by their content (`recognise`).
"""

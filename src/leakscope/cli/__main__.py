"""python -m leakscope.cli"""

from leakscope.cli import main

main()

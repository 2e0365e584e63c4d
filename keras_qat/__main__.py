"""`python -m keras_qat`: the command line."""

from keras_qat_cli import main

main()

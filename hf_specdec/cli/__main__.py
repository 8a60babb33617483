"""`python -m hf_specdec.cli`, as `hf-specdec`."""

import sys

from hf_specdec.cli import main

sys.exit(main())

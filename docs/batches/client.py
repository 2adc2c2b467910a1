"""Ask a resident `ltx2` for clips, one after the other: python client.py --model demo"""

import json
import sys
from subprocess import PIPE, Popen

with Popen(["ltx2", "batch", "-", "--json", *sys.argv[1:]], stdin=PIPE, stdout=PIPE, text=True) as ltx2:
    for prompt in ("A red ball bounces", "A blue ball rests"):
        print(json.dumps({"prompt": prompt, "seed": 7}), file=ltx2.stdin, flush=True)
        result = json.loads(ltx2.stdout.readline())
        print(result["line"], result["status"], *result.get("clips", ()), result.get("error", ""))
    ltx2.stdin.close()

"""Presets, cost records and splits obey their JSON schemas and bear their files' names; the values
of cost records lie within the physical bounds that they state, and their states say so.

python3 check_schemas.py ROOT
"""

import json
import pathlib
import sys
from typing import Any

SKIPPED = 77


KINDS = (
    ("models/clusters/*.json", "models/cluster.schema.json"),
    ("models/moe/*.json", "models/moe.schema.json"),
    ("models/costs/*.json", "models/cost.schema.json"),
    ("validate/profiles/*.json", "validate/profile.schema.json"),
    ("validate/data/**/*.split.json", "validate/data/public/split.schema.json"),
)


def bounds_errors(record: dict[str, Any]) -> list[str]:
    """Numbers of a cost record outside their bounds, or with a state that does not fit."""
    numbers = {k: v for k, v in record.items() if isinstance(v, dict) and "state" in v}
    for op in ("dispatch", "combine"):
        numbers.update({f"{op}.{k}": v for k, v in record.get(op, {}).items()})
    errors = []
    for name, n in numbers.items():
        if not n["low"] <= n["value"] <= n["high"]:
            errors.append(f"{name} is {n['value']}: its bounds are [{n['low']}, {n['high']}]")
        ends = {"at-low": n["low"], "at-high": n["high"]}
        if n["state"] in ends and n["value"] != ends[n["state"]]:
            errors.append(f"{name} is {n['state']} but not at that bound")
        if n["state"] == "fitted" and n["value"] in ends.values():
            errors.append(f"{name} lies at a bound and does not say so")
    return errors


def main() -> int:
    try:
        import jsonschema
    except ImportError:
        print("skipped: jsonschema is not installed (pip install jsonschema)")
        return SKIPPED
    root = pathlib.Path(sys.argv[1])
    failures = 0
    for pattern, schema_name in KINDS:
        schema = json.loads((root / schema_name).read_text())
        jsonschema.Draft202012Validator.check_schema(schema)
        validator = jsonschema.Draft202012Validator(schema)
        files = sorted(root.glob(pattern))
        assert files, f"no files like {pattern}"
        for path in files:
            preset = json.loads(path.read_text())
            errors = [e.message for e in validator.iter_errors(preset)]
            if preset.get("name") != path.name.removesuffix(".json").removesuffix(".split"):
                errors.append(f"its name is {preset.get('name')!r}")
            if "/costs/" in pattern and not errors:
                errors += bounds_errors(preset)
            for error in errors:
                print(f"{path}: {error}")
            failures += len(errors)
            broken = dict(preset, surprise=1)
            assert not validator.is_valid(broken), "the schema takes unknown keys"
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

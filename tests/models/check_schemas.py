"""Every preset under models/ obeys its JSON schema, and bears its file's name."""

import json
import pathlib
import sys

SKIPPED = 77


def main() -> int:
    try:
        import jsonschema
    except ImportError:
        print("skipped: jsonschema is not installed (pip install jsonschema)")
        return SKIPPED
    models = pathlib.Path(sys.argv[1])
    failures = 0
    for kind, schema_name in (("clusters", "cluster"), ("moe", "moe")):
        schema = json.loads((models / f"{schema_name}.schema.json").read_text())
        jsonschema.Draft202012Validator.check_schema(schema)
        validator = jsonschema.Draft202012Validator(schema)
        files = sorted((models / kind).glob("*.json"))
        assert files, f"no files in {models / kind}"
        for path in files:
            preset = json.loads(path.read_text())
            errors = [e.message for e in validator.iter_errors(preset)]
            if preset.get("name") != path.stem:
                errors.append(f"its name is {preset.get('name')!r}")
            for error in errors:
                print(f"{path}: {error}")
            failures += len(errors)
            broken = dict(preset, surprise=1)
            assert not validator.is_valid(broken), "the schema takes unknown keys"
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

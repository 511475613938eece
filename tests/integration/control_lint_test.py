#!/usr/bin/env python3
"""buf's lint of the protos, with the API guide's protos beside them. Exit code 77 where buf or those protos are absent."""
import os
import shutil
import subprocess
import sys
import tempfile
import unittest

from cluster import Case, ROOT, tool

GOOGLEAPIS = os.environ.get("MOONPIPE_GOOGLEAPIS", "")


def lint(protos):
    """buf lint of a folder of protos with its own rules: (exit code, output)."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(protos, os.path.join(folder, "protos"))
        for part in ("api", "rpc"):
            shutil.copytree(os.path.join(GOOGLEAPIS, "google", part), os.path.join(folder, "googleapis", "google", part))
        with open(os.path.join(protos, "buf.yaml"), encoding="utf-8") as file:
            own = file.read()
        os.remove(os.path.join(folder, "protos", "buf.yaml"))
        # The same rules over two modules; only ours is judged.
        config = own.replace("  - path: .\n", "  - path: protos\n  - path: googleapis\n")
        config = config.replace("ignore: [grpc]", "ignore: [protos/grpc, googleapis]")
        with open(os.path.join(folder, "buf.yaml"), "w", encoding="utf-8") as file:
            file.write(config)
        environment = {**os.environ, "HOME": folder, "BUF_CACHE_DIR": os.path.join(folder, "cache")}
        result = subprocess.run([tool("buf"), "lint"], cwd=folder, capture_output=True, text=True, check=False, env=environment)
        return result.returncode, result.stdout + result.stderr


class Lint(Case):
    def test_the_protos_are_clean(self):
        self.assertEqual(lint(os.path.join(ROOT, "protos")), (0, ""))

    def test_a_field_without_a_comment_is_found(self):
        with tempfile.TemporaryDirectory() as folder:
            protos = os.path.join(folder, "protos")
            shutil.copytree(os.path.join(ROOT, "protos"), protos)
            path = os.path.join(protos, "moonpipe", "cluster", "v1", "checkpoint.proto")
            with open(path, encoding="utf-8") as file:
                text = file.read()
            with open(path, "w", encoding="utf-8") as file:
                file.write(text.replace("  // Folder on the coordinator's machine.\n", ""))
            code, output = lint(protos)
        self.assertNotEqual(code, 0)
        self.assertIn('Field "path" should have a non-empty comment', output)


if __name__ == "__main__":
    tool("buf")
    if not os.path.isdir(os.path.join(GOOGLEAPIS, "google", "api")):
        print(f"skipped: the protos of the API guide are not in {GOOGLEAPIS}; scripts/setup unpacks them")
        sys.exit(77)
    unittest.main()

#!/usr/bin/env python3
"""Tests of check_dockerfile.py: what it must refuse."""
import unittest

import check_dockerfile


class Dockerfile(unittest.TestCase):
    def setUp(self):
        self.text = check_dockerfile.read("deploy", "images", "Dockerfile")

    def problems(self, old, new):
        self.assertIn(old, self.text)
        return "\n".join(check_dockerfile.check_text(self.text.replace(old, new)))

    def test_accepts_the_file_as_it_is(self):
        self.assertEqual(list(check_dockerfile.check_text(self.text)), [])

    def test_refuses_a_source_that_does_not_exist(self):
        self.assertIn("no such file", self.problems("COPY cli cli", "COPY cly cli"))

    def test_refuses_a_builder_that_lacks_a_folder_of_the_build(self):
        self.assertIn("needs protos", self.problems("COPY protos protos\n", ""))

    def test_refuses_a_program_that_is_not_built(self):
        self.assertIn("scripts/build is given", self.problems(" moonpipe-dataloader", ""))

    def test_refuses_libtorch_where_programs_do_not_look(self):
        self.assertIn("LibTorch is not copied", self.problems("RPATH=/opt/moonpipe/torch", "RPATH=/opt/other/torch"))

    def test_refuses_another_libtorch_than_the_set_up_unpacks(self):
        self.assertIn("scripts/setup unpacks", self.problems("/cache/torch-2.11.0", "/cache/torch-2.10.0"))

    def test_refuses_root(self):
        self.assertIn("USER is []", self.problems("USER 10001:10001\n", ""))

    def test_refuses_what_the_builder_does_not_make(self):
        self.assertIn("the builder makes only /stage", self.problems("--from=builder /stage/usr/bin", "--from=builder /out/usr/bin"))

    def test_reads_the_libraries_of_libtorch(self):
        self.assertEqual(check_dockerfile.torch_files(self.text),
                         ["torch/lib/libc10.so", "torch/lib/libtorch_cpu.so", "torch/lib/libgomp.so.1",
                          "nvidia/cu13/lib/libcudart.so.13", "nvidia/cu13/lib/libcupti.so.13"])


if __name__ == "__main__":
    unittest.main()

#!/usr/bin/env python3
"""Checks deploy/images: what the Dockerfile copies exists, and its package list is what the programs load.

usage: check_dockerfile.py [--build FOLDER] [--torch FOLDER] [--write]
  --build  a build folder in which the programs are built: they are installed into a temporary folder, and the packages of all
           libraries that they load must be those of runtime-packages.txt
  --torch  the unpacked LibTorch: the libraries that the image gets must be enough for each other
  --write  with --build: writes runtime-packages.txt anew
Exit code 1 with one line per problem; 77 where a check that was asked for could not run.
"""
import argparse
import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
IMAGES = os.path.join(ROOT, "deploy", "images")
PROGRAMS = {"moonpipe", "moonpipe-coordinator", "moonpipe-dataloader", "moonpipe-vision-encoder", "moonpipe-decoder-stage"}
HEAD = "# Debian 12 packages with the libraries that the programs load. Written by tests/deploy/check_dockerfile.py --build FOLDER --write.\n"


def read(*path):
    with open(os.path.join(ROOT, *path), encoding="utf-8") as file:
        return file.read()


def stages(text):
    """[(name, [(instruction, rest)])] of a Dockerfile."""
    text = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    found = []
    for line in text.splitlines():
        if not line.strip():
            continue
        instruction, rest = line.split(None, 1)
        if instruction == "FROM":
            found.append((rest.split()[-1], []))
        found[-1][1].append((instruction, rest.strip()))
    return found


def listed_packages():
    return [line for line in read("deploy", "images", "runtime-packages.txt").splitlines() if line and not line.startswith("#")]


def torch_files(text):
    """Paths below the LibTorch folder that the builder copies."""
    return re.findall(r"\b((?:torch|nvidia)/\S*lib\w+\.so[.\d]*)(?=\s)", text)


def check_text(text):
    """Problems that the Dockerfile and the tree show alone."""
    found = stages(text)
    builder, runtime = dict(found)["builder"], dict(found)["runtime"]
    for name, instructions in found:
        for instruction, rest in instructions:
            if instruction == "ADD":
                yield f"{name}: ADD {rest}: use COPY"
            if instruction != "COPY" or rest.startswith("--from"):
                continue
            for source in rest.split()[:-1]:
                if not glob.glob(os.path.join(ROOT, source)):
                    yield f"{name}: COPY {source}: there is no such file in the tree"
    copied = {source for instruction, rest in builder if instruction == "COPY" for source in rest.split()[:-1]}
    for needed in re.findall(r"add_subdirectory\((\w+)\)", read("CMakeLists.txt")) + ["cmake", "scripts"]:
        if needed not in copied:
            yield f"builder: the build needs {needed}, which is not copied"
    commands = " ".join(rest for instruction, rest in builder if instruction == "RUN")
    for instruction, rest in runtime:
        if instruction == "COPY" and rest.startswith("--from="):
            source = rest.split()[1]
            if rest.split()[0] != "--from=builder" or not re.search(r"DESTDIR=/stage\b|\s/stage/opt", commands) or not source.startswith("/stage/"):
                yield f"runtime: COPY {rest}: the builder makes only /stage"
    built = re.search(r"scripts/build dev ([\w -]+?)\s+&&", commands)
    if not built or set(built.group(1).split()) != PROGRAMS:
        yield f"builder: scripts/build is given {built and built.group(1)!r}, not {' '.join(sorted(PROGRAMS))}"
    rpath = re.search(r"CMAKE_INSTALL_RPATH=(\S+)", commands)
    if not rpath or f"/stage{rpath.group(1)}/" not in commands:
        yield "builder: LibTorch is not copied to where installed programs look for it"
    version = re.search(r"torch_version=(\S+)", read("scripts", "setup")).group(1)
    if f"/cache/torch-{version}" not in commands:
        yield f"builder: scripts/setup unpacks LibTorch {version}, which is not what is copied"
    user = [rest for instruction, rest in runtime if instruction == "USER"]
    if user != ["10001:10001"]:
        yield f"runtime: USER is {user}, not the 10001:10001 of the manifests"
    if "runAsUser: 10001" not in read("deploy", "kustomize", "base", "coordinator.yaml"):
        yield "the manifests run as another user than 10001"
    packages = listed_packages()
    if packages != sorted(set(packages)) or not packages:
        yield "runtime-packages.txt is empty, not sorted, or names a package twice"
    for line in read("scripts", "apt-packages.txt").splitlines():
        if line in packages and not line.startswith("lib"):
            yield f"{line} is for building only"


def loaded(path, library_path=""):
    """({library: file}, [libraries not found]) that ldd tells of a program or library."""
    environment = dict(os.environ, LD_LIBRARY_PATH=library_path)
    output = subprocess.run(["ldd", path], capture_output=True, text=True, check=True, env=environment).stdout
    found = dict(re.findall(r"^\s*(\S+) => (/\S+) ", output, re.MULTILINE))
    return found, re.findall(r"^\s*(\S+) => not found", output, re.MULTILINE)


def package_of(file):
    """The package that owns a library, or None. Debian files libraries under /usr/lib or, of old, /lib."""
    real = os.path.realpath(file)
    for path in (file, real, real.removeprefix("/usr"), "/usr" + file):
        result = subprocess.run(["dpkg", "-S", path], capture_output=True, text=True, check=False)
        if result.returncode == 0:
            return result.stdout.split(":")[0]
    return None


def check_torch(text, torch):
    """Problems of the LibTorch libraries that are copied: each must find all others among them."""
    with tempfile.TemporaryDirectory() as work:
        for file in torch_files(text):
            source = os.path.join(torch, file)
            if not os.path.exists(source):
                yield f"{file} is not in {torch}"
                continue
            os.makedirs(os.path.dirname(os.path.join(work, file)), exist_ok=True)
            try:
                os.link(os.path.realpath(source), os.path.join(work, file))
            except OSError:  # another file system
                shutil.copy(source, os.path.join(work, file))
        packages = set(listed_packages())
        for file in torch_files(text):
            found, missing = loaded(os.path.join(work, file))
            for name in missing:
                yield f"{file} needs {name}, which is not copied"
            for name, path in found.items():
                if not os.path.realpath(path).startswith(os.path.realpath(work)) and package_of(path) not in packages:
                    yield f"{file} loads {name} from {path}, which no listed package has"


def needed_packages(build, torch):
    """Packages of all libraries that the installed programs load, and problems."""
    packages, found_problems = set(), []
    with tempfile.TemporaryDirectory() as prefix:
        subprocess.run(["cmake", "--install", build, "--prefix", prefix], check=True, capture_output=True, text=True)
        installed = {os.path.basename(path) for path in glob.glob(os.path.join(prefix, "bin", "*"))}
        if installed != PROGRAMS:
            found_problems.append(f"cmake --install gives {sorted(installed)}, not {sorted(PROGRAMS)}")
        copied = {os.path.basename(file) for file in torch_files(read("deploy", "images", "Dockerfile"))}
        for program in sorted(installed):
            found, missing = loaded(os.path.join(prefix, "bin", program), os.path.join(torch, "torch", "lib"))
            found_problems += [f"{program} needs {name}, which is not found" for name in missing]
            for name, path in found.items():
                if os.path.realpath(path).startswith(os.path.realpath(torch) + os.sep):
                    if name not in copied:
                        found_problems.append(f"{program} needs {name} of LibTorch, which the Dockerfile does not copy")
                    continue
                package = package_of(path)
                if package:
                    packages.add(package)
                else:
                    found_problems.append(f"{program} loads {path}, which no package has")
    return packages, found_problems


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build")
    parser.add_argument("--torch")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    text = read("deploy", "images", "Dockerfile")
    found, skipped = list(check_text(text)), []
    tools = all(shutil.which(tool) for tool in ("ldd", "dpkg", "cmake"))
    if arguments.torch:
        if tools and os.path.isdir(arguments.torch):
            found += check_torch(text, arguments.torch)
        else:
            skipped.append(f"{arguments.torch} or one of ldd, dpkg and cmake is absent")
    if arguments.build:
        missing = [name for name in sorted(PROGRAMS) if not os.path.exists(os.path.join(arguments.build, "bin", name))]
        if missing or not tools or not arguments.torch:
            skipped.append(f"not built: {', '.join(missing)}" if missing else "ldd, dpkg, cmake and --torch are needed")
        else:
            packages, more = needed_packages(arguments.build, arguments.torch)
            found += more
            if arguments.write:
                with open(os.path.join(IMAGES, "runtime-packages.txt"), "w", encoding="utf-8") as file:
                    file.write(HEAD + "".join(name + "\n" for name in sorted(packages)))
            for name in sorted(packages - set(listed_packages())):
                found.append(f"runtime-packages.txt lacks {name}")
            for name in sorted(set(listed_packages()) - packages):
                found.append(f"runtime-packages.txt names {name}, from which no program loads a library")
    for problem in found:
        print(problem)
    if found:
        return 1
    for reason in skipped:
        print("skipped:", reason)
    return 77 if skipped else 0


if __name__ == "__main__":
    sys.exit(main())

#!/bin/sh
# Finish /opt/tandem for an image: finish.sh [kernels]. Runs in the stage that has a compiler.
set -eu
/opt/tandem/bin/pip install --no-deps /wheels/*.whl
cd /opt/tandem
site=$(bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
ln -s "$site/tandem_serving" packages # the same path for every Python
if [ "${1:-}" = kernels ]; then # beside the sources, where workers look first
    PYTHONPATH=packages bin/python -m engine.cpu.library
    PYTHONPATH=packages bin/python -m kvtransfer.compiled_digests
fi
rm -rf "$site"/pip "$site"/pip-* "$site"/setuptools* "$site"/pkg_resources "$site"/_distutils_hack* "$site"/distutils-precedence.pth bin/pip*
if [ "${1:-}" != kernels ]; then # torch's and CUDA's libraries come stripped
    find "$site" -name '*.so' -exec strip --strip-unneeded {} +
    # What colours source code on a terminal.
    find "$site/pygments/lexers" "$site/pygments/styles" -name '[a-z]*.py*' -delete
    find "$site" -depth \( -name '*.pyi' -o -name '*.pyx' -o -name '*.pxd' -o -type d -name tests \) -exec rm -r {} +
fi

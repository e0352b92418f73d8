# make demo             semantic search on the best Vulkan device; installs what is missing, the second time it starts at once
# make chat             a conversation with SmolLM2 on the best Vulkan device; ARGS go to purevk chat
# make lint             the formatter, the linter and the type checker, without changes
# make test             the landing tier of the tests, on lavapipe, in 20 minutes on two cores; ARGS go to pytest
# make test-nightly     all tests, with the wheel's shader compiler, which knows matrix cores (built once, into build/shaderc),
#                       and the engines; ARGS go to pytest, and then no engines run
# make test-unit        the tests that need no device
# make test-fast        what takes less than a second each
# make test-traits      tests of operators, models and programs on lavapipe taken for a GPU
# make test-validation  the landing tier under the Vulkan validation layer
# make test-matrix      tests with each optional device feature off in turn, and with the traits of a GPU
# make docs             the documentation site, in build/site; ARGS go to mkdocs
# make wheels           the wheels of this platform, in dist/, tried with each Python; ARGS go to scripts/wheels.sh
# make test-engines     the recipes for Ray, LitServe and KServe on these engines, in an environment of their own
# make devices          the table of devices in docs/help/devices.md, from drivers of Debian's packages; ARGS go to
#                       bench.drivers; by hand before a release
# make bench            purevk beside other runtimes on this machine; ARGS go to bench.compare

SHADERC := $(CURDIR)/build/shaderc/libshaderc_shared$(if $(filter Darwin,$(shell uname -s)),.dylib,.so)

.PHONY: demo chat lint test test-unit test-fast test-traits test-landing test-nightly test-validation test-matrix bench devices docs wheels setup test-engines
demo:
	@scripts/demo.sh $(ARGS)
chat:
	@scripts/chat.sh $(ARGS)
lint:
	@scripts/test.sh lint
test: test-landing
test-unit test-fast test-traits test-landing: test-%:
	@scripts/test.sh $* $(ARGS)
test-nightly:
	@[ -e $(SHADERC) ] || TARGET=$(SHADERC) VALIDATOR=1 packaging/build_shaderc.sh
	@PUREVK_SHADERC=$(SHADERC) PATH="$(dir $(SHADERC)):$$PATH" scripts/test.sh nightly $(ARGS)
	@$(if $(ARGS),,scripts/engines.sh)
test-validation:
	@scripts/test.sh landing --validation $(ARGS)
test-matrix:
	@scripts/setup.sh --test
	@.venv/bin/python scripts/matrix.py $(ARGS)
test-engines:
	@scripts/engines.sh $(ARGS)
docs:
	@scripts/setup.sh
	@NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict $(ARGS)
wheels:
	@scripts/wheels.sh $(ARGS)
devices:
	@scripts/setup.sh --test
	@[ -e $(SHADERC) ] || TARGET=$(SHADERC) VALIDATOR=1 packaging/build_shaderc.sh
	@PUREVK_SHADERC=$(SHADERC) PATH="$(dir $(SHADERC)):$$PATH" .venv/bin/python -m bench.drivers $(ARGS)
bench:
	@scripts/bench.sh $(ARGS)
setup:
	@scripts/setup.sh

# make demo             semantic search on the best Vulkan device; installs what is missing, the second time it starts at once
# make test             the whole test suite on lavapipe; ARGS go to pytest
# make test-fast        what takes under two minutes of it
# make test-validation  the fast tests under the Vulkan validation layer
# make bench            purevk beside other runtimes on this machine; ARGS go to bench.compare

.PHONY: demo test test-fast test-validation bench setup
demo:
	@scripts/demo.sh $(ARGS)
test:
	@scripts/test.sh $(ARGS)
test-fast:
	@scripts/test.sh --fast $(ARGS)
test-validation:
	@scripts/test.sh --fast --validation $(ARGS)
bench:
	@scripts/bench.sh $(ARGS)
setup:
	@scripts/setup.sh

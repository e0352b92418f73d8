# make demo    semantic search on the best Vulkan device; installs what is missing, the second time it starts at once
# make test    the test suite on lavapipe; ARGS go to pytest

.PHONY: demo test setup
demo:
	@scripts/demo.sh $(ARGS)
test:
	@scripts/test.sh $(ARGS)
setup:
	@scripts/setup.sh

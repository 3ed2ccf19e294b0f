PYTHON ?= python3

# The official MCP suite, which needs npx and brings a Node that is new enough.
SUITE = npx -y -p node@24 -p @modelcontextprotocol/conformance@0.2.0-alpha.12 conformance client \
        --command "$(PYTHON) test_paicli.py conformance" --timeout 120000

test:     ; $(PYTHON) -m unittest
exercise: ; $(PYTHON) test_paicli.py blank $(SECTION)
check:    ; $(PYTHON) test_paicli.py check $(SECTION)
prove:    ; $(PYTHON) test_paicli.py prove
map:      ; @$(PYTHON) test_paicli.py map
demo:     ; $(PYTHON) paicli.py --demo
bench:    ; $(PYTHON) test_paicli.py bench
conformance: ; $(SUITE) --requirements 2025-11-25 && $(SUITE) --requirements 2026-07-28
torture:  ; $(PYTHON) test_paicli.py torture

.PHONY: test exercise check prove map demo bench conformance torture

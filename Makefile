PYTHON ?= python3

test:     ; $(PYTHON) -m unittest
exercise: ; $(PYTHON) test_paicli.py blank $(SECTION)
check:    ; $(PYTHON) test_paicli.py check $(SECTION)
prove:    ; $(PYTHON) test_paicli.py prove
map:      ; @$(PYTHON) test_paicli.py map
demo:     ; $(PYTHON) paicli.py --demo
bench:    ; $(PYTHON) test_paicli.py bench
conformance: ; npx -y @modelcontextprotocol/conformance@0.2.0-alpha.12 client --command "$(PYTHON) test_paicli.py conformance" --requirements 2026-07-28 -o /tmp/mcp-conformance
torture:  ; $(PYTHON) test_paicli.py torture

.PHONY: test exercise check prove map demo bench conformance torture

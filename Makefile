PYTHON ?= python3

test:     ; $(PYTHON) -m unittest
exercise: ; $(PYTHON) test_paicli.py blank $(SECTION)
check:    ; $(PYTHON) test_paicli.py check $(SECTION)
prove:    ; $(PYTHON) test_paicli.py prove
map:      ; @$(PYTHON) test_paicli.py map
demo:     ; $(PYTHON) paicli.py --demo
bench:    ; $(PYTHON) test_paicli.py bench
torture:  ; $(PYTHON) test_paicli.py torture

.PHONY: test exercise check prove map demo bench torture

# Every action a person takes. `make` alone prints them, each from its own ## comment.

HOSTS     ?= localhost
INVENTORY ?= inventory
PLAN      ?= quick
FOLDER    ?=
FORKS     ?=
ARGS      ?=
CONFIRM   ?=

VENV      := .venv
STAMP     := $(VENV)/.whole
BIN       := $(VENV)/bin
TEST_ROOT ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/fastpersist-bench-test
DATA_ROOT := $(or $(BENCH_RUNTIME_ROOT),$(or $(XDG_DATA_HOME),$(HOME)/.local/share)/fastpersist-bench)

export PATH := $(CURDIR)/$(BIN):$(PATH)
export ANSIBLE_CONFIG := $(CURDIR)/ansible.cfg

PLAYBOOK = ansible-playbook --inventory $(INVENTORY) --limit '$(HOSTS)' $(if $(FORKS),--forks $(FORKS)) \
	$(if $(FOLDER),--extra-vars 'bench_folder=$(FOLDER)')

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:

.PHONY: help
help: ## print this
	@echo "make TARGET [HOSTS=localhost] [INVENTORY=inventory] [PLAN=quick] [FOLDER=] [FORKS=] [ARGS=]"
	@awk -F ':[^#]*## ' '/^[a-z][a-z-]*:[^#]*## / {printf "  %-12s %s\n", $$1, $$2} \
		/^## / {printf "\n%s\n", substr($$0, 4)}' $(MAKEFILE_LIST)

## An audit

.PHONY: provision
provision: hosts-match ## make HOSTS ready: array where asked for, torch, DeepSpeed, compiled ops, the patch
	@$(PLAYBOOK) playbooks/provision.yml $(ARGS)

.PHONY: run
run: hosts-match ## measure PLAN on HOSTS, collect, print the verdicts (ARGS=--dry-run: only say what it would write)
	@$(PLAYBOOK) --extra-vars 'bench_run_plan=$(PLAN)' playbooks/run.yml $(ARGS)

.PHONY: rollback
rollback: hosts-match ## put the original serialization.py back on HOSTS, byte for byte
	@$(PLAYBOOK) playbooks/rollback.yml $(ARGS)

.PHONY: teardown
teardown: hosts-match ## take the array apart on HOSTS (CONFIRM=name of the array)
	@$(PLAYBOOK) --extra-vars 'nvme_raid_confirm=$(CONFIRM)' playbooks/teardown.yml $(ARGS)

# A pattern that matches nothing must fail, also where Ansible itself would only warn.
.PHONY: hosts-match
hosts-match: $(STAMP)
	@ansible all --inventory $(INVENTORY) --limit '$(HOSTS)' --list-hosts >.ansible/hosts-match 2>&1 \
		&& ! grep -q 'hosts (0)' .ansible/hosts-match || { grep -i error .ansible/hosts-match >&2; \
		echo "HOSTS=$(HOSTS) does not name hosts of INVENTORY=$(INVENTORY); 'make hosts HOSTS=all' lists them" >&2; exit 2; }

## Development

.PHONY: venv
venv: $(STAMP) ## make the controller's environment, .venv (other targets do so when they need it)

# The same under its folder's name, for who types that.
.PHONY: $(VENV)
$(VENV): $(STAMP)

$(STAMP): requirements/uv.txt requirements/controller.txt requirements/dev.txt requirements/controller-venv.sh pyproject.toml
	@mkdir -p .ansible && requirements/controller-venv.sh $(VENV) $(STAMP)

# Every action a person takes. `make` alone prints them, each from its own ## comment.

HOSTS     ?= localhost
INVENTORY ?= inventory
PLAN      ?= quick
FOLDER    ?=
FORKS     ?=
ARGS      ?=
CONFIRM   ?=
RUN       ?=
RETRY     ?=
ACCEPT_NEW_KEYS ?=

VENV      := .venv
STAMP     := $(VENV)/.whole
BIN       := $(VENV)/bin
TEST_ROOT ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/fastpersist-bench-test
DATA_ROOT := $(or $(BENCH_RUNTIME_ROOT),$(or $(XDG_DATA_HOME),$(HOME)/.local/share)/fastpersist-bench)

export PATH := $(CURDIR)/$(BIN):$(PATH)
export ANSIBLE_CONFIG := $(CURDIR)/ansible.cfg
export ACCEPT_NEW_KEYS
ifneq ($(filter 1 true yes,$(ACCEPT_NEW_KEYS)),)
export ANSIBLE_SSH_EXTRA_ARGS := -o StrictHostKeyChecking=accept-new
endif

PLAYBOOK = ansible-playbook --inventory $(INVENTORY) --limit '$(HOSTS)' $(if $(FORKS),--forks $(FORKS)) \
	$(if $(FOLDER),--extra-vars 'bench_folder=$(FOLDER)')

ON_HOSTS = $(foreach source,$(INVENTORY),--inventory '$(source)') --hosts '$(HOSTS)'
OF_RUN   = $(if $(RUN),--run '$(RUN)')
# In `make provision run` a host that can't be provisioned costs its own row in the verdict, not everybody's run.
GOES_ON  = $(if $(filter run,$(MAKECMDGOALS)),-)

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:

.PHONY: help
help: ## print this
	@echo "make TARGET [HOSTS=localhost] [INVENTORY=inventory] [PLAN=quick] [FOLDER=] [FORKS=] [ARGS=] [RUN=latest] [RETRY=] [ACCEPT_NEW_KEYS=]"
	@awk -F ':[^#]*## ' '/^[a-z][a-z-]*:[^#]*## / {printf "  %-12s %s\n", $$1, $$2} \
		/^## / {printf "\n%s\n", substr($$0, 4)}' $(MAKEFILE_LIST)

## An audit

.PHONY: provision
provision: hosts-match ## make HOSTS ready: array where asked for, torch, DeepSpeed, compiled ops, the patch
	$(GOES_ON)@$(PLAYBOOK) playbooks/provision.yml $(if $(GOES_ON),,$(ARGS))

.PHONY: run
run: $(STAMP) ## measure PLAN on HOSTS, watch, collect, print the verdicts (RETRY=last: who did not pass; ARGS=--dry-run)
	@bench audit '$(PLAN)' $(ON_HOSTS) $(if $(RETRY),--retry '$(RETRY)') $(if $(FOLDER),--folder '$(FOLDER)') \
		$(if $(FORKS),--forks $(FORKS)) $(ARGS)

.PHONY: hosts
hosts: $(STAMP) ## list the hosts that HOSTS names, and how they are reached
	@bench hosts $(ON_HOSTS)

.PHONY: status
status: $(STAMP) ## say once what every host of the latest run (or RUN) is doing
	@bench status $(OF_RUN)

.PHONY: watch
watch: $(STAMP) ## attach to the run and show it until it has ended everywhere
	@bench watch $(OF_RUN) $(ARGS)

.PHONY: collect
collect: $(STAMP) ## fetch the reports and logs that are ready
	@bench collect $(OF_RUN) $(ARGS)

.PHONY: report
report: $(STAMP) ## judge every targeted host, write the pages, print the verdicts
	@bench report $(OF_RUN) $(ARGS)

.PHONY: cancel
cancel: $(STAMP) ## stop the run on all of its hosts
	@bench cancel $(OF_RUN) $(ARGS)

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

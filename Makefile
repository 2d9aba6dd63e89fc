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
# Compiled ops are shared with this machine's own runtime, so that they are compiled once.
TEST_OPS  ?= $(or $(BENCH_OPS_CACHE),$(or $(XDG_DATA_HOME),$(HOME)/.local/share)/fastpersist-bench/ops)
# Debian's names of what the tests start; tests/vm and tests/fleet say what for.
TEST_PACKAGES := g++ libaio-dev fio openssh-server openssh-client sudo iproute2 util-linux e2fsprogs fdisk \
	qemu-system-x86 debootstrap

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

# Nothing is installed: the node's runtime when make provision made one, else the Python that is named, with the
# bench of this checkout.
GPU_PYTHON ?= $(firstword $(wildcard $(or $(BENCH_RUNTIME_ROOT),$(or $(XDG_DATA_HOME),$(HOME)/.local/share)/fastpersist-bench)/venv/bin/python) python3)
GPU_BENCH   = PYTHONPATH='$(CURDIR)'$${PYTHONPATH:+:$$PYTHONPATH} '$(GPU_PYTHON)' -m bench

.PHONY: gpu-check
gpu-check: PLAN = gpu
gpu-check: ## every writer with the data on this node's GPU; torch's file stays as it is (PLAN=gpu-phi3, GPU_PYTHON=, FOLDER=)
	@$(GPU_BENCH) ops build
	@$(GPU_BENCH) run '$(PLAN)' --gpu --no-patch $(if $(FOLDER),--folder '$(FOLDER)') $(ARGS)

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
	@listed=$$(ansible all --inventory $(INVENTORY) --limit '$(HOSTS)' --list-hosts 2>&1); \
	case "$$?$$listed" in 0*"hosts (0)"*|[!0]*) printf '%s\n' "$$listed" | grep -i error >&2; \
		echo "HOSTS=$(HOSTS) does not name hosts of INVENTORY=$(INVENTORY); 'make hosts HOSTS=all' lists them" >&2; exit 2;; esac

## Development

.PHONY: venv
venv: $(STAMP) ## make the controller's environment, .venv (other targets do so when they need it)

# The same under its folder's name, for who types that.
.PHONY: $(VENV)
$(VENV): $(STAMP)

$(STAMP): requirements/uv.txt requirements/controller.txt requirements/dev.txt requirements/controller-venv.sh pyproject.toml
	@mkdir -p .ansible && requirements/controller-venv.sh $(VENV) $(STAMP)

.PHONY: test
test: $(STAMP) ## everything below but pins: lint and all tests, then where the time went
	@$(BIN)/python tests/stages.py "$(MAKE)" lint test-unit test-host test-fleet test-vm

.PHONY: lint
lint: $(STAMP) ## ruff, mypy, yamllint, ansible-lint (production profile, offline)
	@failed=; for linter in 'ruff check --quiet .' 'ruff format --quiet --check .' 'mypy --no-error-summary' \
		'yamllint --strict .' 'ansible-lint -q'; do $$linter || failed="$$failed $${linter%% *}"; done; \
	[ -z "$$failed" ] || { echo "lint:$$failed found faults (above)" >&2; exit 1; }

.PHONY: test-unit
test-unit: $(STAMP) ## pure tests, seconds
	@python -m pytest tests/unit $(ARGS)

.PHONY: test-host
test-host: test-packages ## real torch and DeepSpeed on this machine, in a runtime of their own
	@ansible-playbook --inventory inventory --limit localhost playbooks/provision.yml \
		--extra-vars 'bench_runtime_root=$(TEST_ROOT) bench_runtime_ops_cache=$(TEST_OPS)' \
		--extra-vars '{"bench_runtime_extra_pins": ["$(CURDIR)/requirements/test-host.txt"]}'
	@PYTHONPATH='$(CURDIR)' '$(TEST_ROOT)/venv/bin/python' -m pytest tests/host $(ARGS)

.PHONY: test-fleet
test-fleet: test-packages ## real Ansible, OpenSSH and paramiko between network namespaces
	@TEST_OPS='$(TEST_OPS)' python -m pytest tests/fleet $(ARGS)

.PHONY: test-vm
test-vm: test-packages ## arrays, in a virtual machine with emulated NVMe drives
	@python -m pytest tests/vm $(ARGS)

# As root only: somebody else's machine gets a line that names what is missing.
.PHONY: test-packages
test-packages: $(STAMP)
	@missing=$$(dpkg-query -W -f '$${db:Status-Status} $${Package}\n' $(TEST_PACKAGES) 2>&1 | sed -n 's/^not-installed //p; s/^config-files //p; s/.*no packages found matching //p'); \
	if [ -n "$$missing" ]; then \
		[ "$$(id -u)" = 0 ] || { echo "the tests need: sudo apt-get install" $$missing >&2; exit 1; }; \
		DEBIAN_FRONTEND=noninteractive; export DEBIAN_FRONTEND; \
		apt-get -qq update && apt-get -qq install --no-install-recommends $$missing >/dev/null; \
	fi

.PHONY: wheel-dir
wheel-dir: $(STAMP) ## fill DIR with every pinned file, for hosts without a network (their bench_runtime_wheel_dir)
	@[ -n '$(DIR)' ] || { echo "name the folder: make wheel-dir DIR=/mnt/share/wheels" >&2; exit 2; }
	@python -m pip download --quiet --require-hashes --no-deps --no-build-isolation --dest '$(DIR)' $(ARGS) \
		-r requirements/uv.txt -r requirements/host-build.txt -r requirements/host.txt

.PHONY: pins
pins: $(STAMP) ## resolve requirements/*.in anew, with hashes (ARGS=--upgrade for the newest)
	@for name in uv controller dev host-build host test-host gpu; do \
		case $$name in controller|dev) oldest=3.11;; *) oldest=3.10;; esac; \
		uv pip compile --quiet --universal --generate-hashes --no-header --no-emit-index-url \
			--fork-strategy fewest --python-version $$oldest $(ARGS) requirements/$$name.in -o requirements/$$name.txt || exit 1; \
	done

.PHONY: clean
clean: ## remove what make made in this checkout (not results, not the runtime)
	@rm -rf $(VENV) .ansible .ruff_cache .mypy_cache .pytest_cache
